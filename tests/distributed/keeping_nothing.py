"""Run by torchrun: the command line, where even a tiny model on disk does not stay in memory."""

from dotmoe.cli import main
from dotmoe.models import on_disk

if __name__ == "__main__":
    on_disk.KEPT_BYTES = 0
    main()
