"""The least limit of a process's control groups, of either version, and of the groups above."""

import pytest
import torch

from dotmoe.common import device
from dotmoe.common.cgroups import memory_limit


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "900\n", "job/step/memory.max": "max\n"}, 900),
        ("0::/job/step\n", {"job/memory.max": "900\n", "job/step/memory.max": "700\n"}, 700),
        ("0::/job\n", {"memory.max": "800\n"}, 800),  # a container shows its own root
        ("0::/job\n", {"job/memory.max": "max\n"}, None),
        ("0::/\n", {}, None),
        (
            "9:name=systemd:/\n5:cpu,memory:/job\n",
            {"memory/job/memory.limit_in_bytes": "600\n", "memory.max": "1\n"},
            600,
        ),
        ("5:memory:/job\n", {"memory/memory.limit_in_bytes": "500\n"}, 500),
        ("5:pids:/job\n", {"memory/memory.limit_in_bytes": "500\n"}, None),
    ],
)
def test_the_least_limit_counts(groups, files, limit, tmp_path):
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "mounted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_limit(tmp_path / "cgroup", tmp_path / "mounted") == limit
    assert memory_limit(tmp_path / "absent", tmp_path / "mounted") is None


def test_memory_of_the_cpu_is_what_this_process_may_use(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(device, "memory_limit", lambda: None)
    whole = device.memory_of(cpu)
    monkeypatch.setattr(device, "memory_limit", lambda: 2**30)
    assert device.memory_of(cpu) == 2**30 < whole
    monkeypatch.setattr(device, "memory_limit", lambda: 2**62)  # version 1 states it so
    assert device.memory_of(cpu) == whole
