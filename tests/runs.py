"""Commands as users give them, tiny runs and what they hold, processes to kill, and ranks.

Processes are forks of this one, which need no second start.
"""

import gc
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dotmoe.cli import run
from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json
from dotmoe.method.layout import ExpertLayout
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import load_dense
from dotmoe.text.blocks import TokenBlocks

PATIENCE_S = 240
TEXT = "\n".join(
    f"Line {i}: the {['cat', 'dog', 'crow'][i % 3]} ate {i * 7 % 13} figs." for i in range(400)
)
"""Some 12,000 tokens of a tiny model."""
_SHORT = {"steps": 6, "batch_size": 2, "checkpoint_every": 2}
_SHORT |= {"scale_tokens": 128, "verify_tokens": 128}
TINY_CONVERT = _SHORT | {"expert_size": 8, "seq_len": 32, "lr": 1e-2, "calibration_tokens": 256}
TINY_CONVERT |= {"no_repair": [], "active": 0.25, "shared": 0.0, "eval_tokens": 256}
TINY_FINETUNE = _SHORT | {"lr": 1e-3}

FORMATS_OF = {
    "llama": ("glm4_moe", "mixtral", "granitemoe"),
    "mistral": ("glm4_moe", "mixtral", "granitemoe"),
    "phi3": ("glm4_moe", "mixtral", "granitemoe"),
    "qwen2": ("glm4_moe",),
    "qwen3": ("glm4_moe", "qwen3_moe"),
    "granite": ("granitemoe",),
    "olmo2": ("flex_olmo",),
}
"""Formats that can hold a plain model of each family, that of `--format auto` first."""
_KIN = ("internlm3", "iquestcoder", "cwm", "ministral")
FORMATS_OF_KIN = dict.fromkeys(_KIN, ("glm4_moe", "mixtral"))
FORMATS_OF_KIN |= {"seed_oss": ("glm4_moe",), "ministral3": ("glm4_moe", "mixtral")}
FORMATS_OF_KIN["qwen3_5_text"] = ("qwen3_5_moe_text",)
FORMATS_OF_KIN["granitemoehybrid"] = ("granitemoe",)
"""The same of families that differ from one of those in their config alone; heads have a width of
their own."""
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
_YARN |= {"original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
REQUIRED = {
    **{"ministral": {"head_dim": 24}, "glm4": {"head_dim": 16}, "gemma": {"head_dim": 16}},
    **{"gemma2": {"head_dim": 16}, "hunyuan_v1_dense": {"head_dim": 16}},
    "ministral3": {"head_dim": 24, "rope_parameters": _YARN},
    "granitemoehybrid": {
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96},
        **{"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"},
        **{"mamba_n_heads": 8, "mamba_d_state": 16, "attention_multiplier": 0.2},
    },
    "lfm2": {
        **{"layer_types": ["conv", "full_attention"], "head_dim": 16},
        **{"intermediate_size": 140, "block_multiple_of": 32},
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        **{"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
}
"""Entries of a config without which a stock class makes no tiny model."""
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}


def rope(kind: str, theta: float = 1e4, **values: float) -> dict[str, Any]:
    """Options of a tiny model that scales its rotary embeddings."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


_FREQUENCIES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE = rope("llama3", 5e5, factor=8.0, original_max_position_embeddings=32, **_FREQUENCIES)


def loaded(source: Path | str, **how: Any) -> DenseModel:
    """A dense model in memory, on the CPU unless another device is named."""
    return load_dense(str(source), LoadConfig(**{"device": "cpu", **how}))


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Parameters of all pairs; each of `values` is quick with one of `others`, these in turn."""
    return [
        pytest.param(value, other, marks=[pytest.mark.slow] * (place % len(others) != turn))
        for place, value in enumerate(values)
        for turn, other in enumerate(others)
    ]


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters that are slow, but for some."""
    return [pytest.param(each, marks=[pytest.mark.slow] * (each not in quick)) for each in values]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: weight for file in files for name, weight in load_file(file).items()}


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The line with which a call is refused."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message, message
    return message


def put_into(path: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(read_json(path) | values))


@contextmanager
def rewritten(folder: Path, name: str = "model.safetensors") -> Iterator[dict[str, torch.Tensor]]:
    """Within this context, change the tensors of a checkpoint's file, which has them at the end."""
    tensors = load_file(folder / name)
    yield tensors
    save_file(tensors, folder / name, metadata={"format": "pt"})


def with_an_outlier(model: Path, place: Path) -> Path:
    """A copy of a checkpoint whose first layer contributes a hundred times as much."""
    copy = Path(shutil.copytree(model, place / "with_an_outlier"))
    with rewritten(copy) as weights:
        weights["model.layers.0.mlp.down_proj.weight"] *= 100
    return copy


def words(*positional: Any, **options: Any) -> list[str]:
    """A command line: `words("convert", model, out, lr=1e-2)`; lists become several words."""
    line = [str(word) for word in positional]
    if "active_experts" in options:  # the share of a tiny run gives way
        options.pop("active", None)
    if "repair" in options:  # so does what switches it off
        options.pop("no_repair", None)
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        line += [f"--{name.replace('_', '-')}", *map(str, values)]
    return line


@dataclass(frozen=True)
class Outcome:
    """What a command left behind in this process: exit status, standard output, standard error."""

    status: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line of a command that was refused."""
        assert self.status == 2, (self.status, self.err)
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("dotmoe: error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


@dataclass(frozen=True)
class TinyRun:
    """A run folder and the command that makes it, or goes on with it."""

    name: str
    source: Path
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    def command(self, **options: Any) -> list[str]:
        """The command line, with further options."""
        return words(self.name, self.source, self.folder, **self.options | options)

    def made(self) -> "TinyRun":
        """Run the command here and now."""
        assert run(self.command()) == 0
        return self

    def at(self, folder: Path, **options: Any) -> "TinyRun":
        """The same run in another folder, which is not made yet."""
        return replace(self, folder=folder, options=self.options | options)

    def copied_to(self, folder: Path) -> "TinyRun":
        """A copy, to be changed."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return self.at(folder)

    def files(self) -> list[str]:
        """Paths of all files below the folder."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in files]

    def contents(self, *without: str) -> dict[str, bytes]:
        """Every file's bytes, by its path below the folder."""
        names = [name for name in self.files() if name not in without]
        return {name: (self.folder / name).read_bytes() for name in names}

    def layout(self) -> ExpertLayout:
        """Its experts."""
        return ExpertLayout.load(self.folder / "3_extract/layout.safetensors")

    def results(self) -> dict[str, Any]:
        """What it measured."""
        return read_json(self.folder / "6_evaluate/results.json")

    def tensors(self) -> dict[tuple[str, str], tuple[torch.dtype, bytes]]:
        """Every tensor of every safetensors file, bit for bit. A header's order may differ."""
        return {
            (name, key): (tensor.dtype, tensor.view(torch.uint8).numpy().tobytes())
            for name in self.files()
            if name.endswith(".safetensors")
            for key, tensor in load_file(self.folder / name).items()
        }


def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in forks of this process, which to it are torchrun's ranks, on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}

    def as_rank(rank: int) -> None:
        gc.freeze()
        named = shared | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in named.items()})
        work(*arguments)

    forks = [get_context("fork").Process(target=as_rank, args=(rank,)) for rank in range(ranks)]
    try:
        for each in forks:
            each.start()
        for each in forks:
            each.join(PATIENCE_S)
        assert [each.exitcode for each in forks] == [0] * ranks
    finally:
        for each in forks:
            each.kill()


class Forked:
    """A command that runs in a fork of this process; what it says is read with `said`."""

    def __init__(self, arguments):
        # A pipe and no file: a test limits the size of files.
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._said = ""
        self._process = get_context("fork").Process(target=self._run, args=(arguments, writing))
        self._process.start()
        os.close(writing)
        self.pid = self._process.pid

    def _run(self, arguments, writing):
        gc.freeze()  # Garbage of this process may belong to threads that a fork does not have.
        sys.stdout = sys.stderr = os.fdopen(writing, "w", buffering=1)
        sys.exit(run(arguments))

    def said(self):
        """What it has written to either output."""
        with suppress(BlockingIOError):
            self._said += os.read(self._reading, 1 << 20).decode()
        return self._said

    def wait(self):
        """Exit status, negative after a signal."""
        self._process.join()
        return self._process.exitcode

    def is_there_when(self, reached):
        """Wait until a condition holds; False if the process ended before."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            if not self._process.is_alive():
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.0005)
        return True

    def kill_when(self, reached):
        """SIGKILL when a condition holds; False if the process ended before."""
        there = self.is_there_when(reached)
        self._process.kill()
        return there and self.wait() == -signal.SIGKILL


def passed(modules: Mapping[Any, torch.nn.Module], run: Callable[[], Any]) -> dict[Any, tuple]:
    """What each module reads and puts out while something runs, by name."""
    seen = {}

    def see(name, module, args, out):
        seen[name] = args[0], out

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(see, name)))
        run()
    return seen


def random_blocks(rows: int) -> TokenBlocks:
    """Blocks of 24 tokens."""
    generator = torch.Generator().manual_seed(3)
    return TokenBlocks(torch.randint(2, 258, (rows, 24), generator=generator, dtype=torch.int32))


def affinity(*shape, std=1.0, seed=0):
    """Normal scores to solve transport problems of, float64."""
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)
