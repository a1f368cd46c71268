"""Run by torchrun: the command line, where even a tiny model on disk does not stay in memory."""

from dotmoe.checkpoint import on_disk
from dotmoe.cli import main

if __name__ == "__main__":
    on_disk.KEPT_BYTES = 0
    main()
