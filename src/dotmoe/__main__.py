"""`python -m dotmoe`: the same as the `dotmoe` command."""

from dotmoe.cli import main

main()
