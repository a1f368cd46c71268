"""Starts real ranks with torchrun, on gloo and the CPU."""

import os
import subprocess
import sys


def torchrun(ranks, *arguments, timeout=240):
    """Run a script or `-m module` on that many ranks; returns the finished process."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
