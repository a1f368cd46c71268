"""What several ranks see, each in a process of its own."""

import json
from pathlib import Path

import pytest
import torch

from runs import torchrun

WORKER = Path(__file__).with_name("watched_alignment.py")


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory):
    """Does jobs of `watched_alignment` on several ranks; returns what each rank saw, by name."""

    def run(ranks, jobs):
        out = tmp_path_factory.mktemp(f"ranks{ranks}")
        (out / "jobs.json").write_text(json.dumps(jobs))
        finished = torchrun(ranks, WORKER, out / "jobs.json", out)
        assert finished.returncode == 0, finished.stderr[-4000:]
        return {
            job["name"]: [torch.load(out / f"{job['name']}.{rank}.pt") for rank in range(ranks)]
            for job in jobs
        }

    return run
