"""Decode throughput against batch size for several expert counts at equal active neurons.

    python benchmarks/throughput_by_granularity.py                       # a small model, CPU
    python benchmarks/throughput_by_granularity.py --preset qwen25_7b    # 7B widths, one GPU

The paper's figure (fig:throughput) has E = 8, 16, 74 and 148 with a quarter of the FFN active, in
vLLM; this one runs in stock Transformers and includes the dense model. With `--vllm-python`, of an
environment as in `vllm_parity.py`, it runs in vLLM. Models are random, with the config that an
export writes: speed does not depend on what they have learned.
"""

import json
import os
import subprocess
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.progress import Progress
from dotmoe.common.tables import to_markdown
from dotmoe.export.architectures import FORMATS
from dotmoe.measure import bench
from dotmoe.measure.bench import TransformersRunner
from dotmoe.measure.config import BenchConfig
from dotmoe.measure.evaluate.models import StockModel
from dotmoe.method.config import ExpertsConfig
from dotmoe.method.granularity import Granularity, resolve
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from random_models import QWEN25_7B, Shape, default_dtype, random_dense
from rounds import keep
from vllm_parity import ENVIRONMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model shape, and the device it runs on."""

    shape: Shape
    dtype: Literal["float32", "bfloat16"]
    device: str
    batch_sizes: tuple[int, ...]


PRESETS = {
    "cpu": Preset(
        shape=Shape(width=512, ffn_width=4_736, layers=2, heads=8, kv_heads=8),
        dtype="float32",
        device="cpu",
        batch_sizes=(1, 2, 4, 8, 16, 32),
    ),
    "qwen25_7b": Preset(
        shape=QWEN25_7B, dtype="bfloat16", device="cuda", batch_sizes=(1, 4, 16, 64)
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    preset: Literal["cpu", "qwen25_7b"] = "cpu"
    experts: tuple[int, ...] = (8, 16, 74, 148)
    """Experts per layer (E), each a divisor of the FFN width: 4,736 or 18,944."""
    active: float = 0.25
    """Share of the experts that run per token; k is the nearest whole number."""
    format: str = "mixtral"
    """Architecture. `glm4_moe` always has a shared expert, so its work is less equal across E."""
    batch_sizes: tuple[int, ...] | None = None
    """Batch sizes. Default: the preset's."""
    context_tokens: int = 128
    decode_steps: int = 8
    rounds: int = 10
    threads: int | None = None
    clock: Literal["wall", "cpu"] = "wall"
    """Clock, as in `dotmoe bench`; cpu suits one thread on a busy machine."""
    vllm_python: str | None = None
    """Interpreter of an environment with vLLM, to measure in it."""
    out: Path = Path("results/throughput_by_granularity.json")
    seed: int = 0


def main() -> None:
    settings = settings_of(Settings, __doc__)
    preset = PRESETS[settings.preset]
    how = {"dtype": getattr(torch, preset.dtype), "device": preset.device, "seed": settings.seed}
    dense = random_dense(preset.shape, **how)
    measured = in_vllm if settings.vllm_python else measured_at
    runs = {str(e): measured(settings, preset, dense, e) for e in settings.experts}
    record = {"preset": settings.preset, "shape": asdict(preset.shape), "runs": runs}
    keep(settings.out, record, settings.seed)


def measured_at(
    settings: Settings, preset: Preset, dense: DenseModel, experts: int
) -> dict[str, Any]:
    """Speed of the MoE of one expert count and of the dense model, in this process."""
    split = resolve(ExpertsConfig(experts=experts, active=settings.active), preset.shape.ffn_width)
    moe = f"moe-{experts}"
    models = {"dense": dense.model, moe: random_moe(dense, split, settings.format)}
    context = preset.shape.context

    def loaded(path: Path, load: LoadConfig) -> StockModel:
        return StockModel(models[path.name], None, preset.dtype, context)

    config = BenchConfig(
        dense="dense",
        moe=moe,
        batch_sizes=settings.batch_sizes or preset.batch_sizes,
        prompt_tokens=0,
        context_tokens=(settings.context_tokens,),
        decode_steps=settings.decode_steps,
        rounds=settings.rounds,
        threads=settings.threads,
        clock=settings.clock,
        load=LoadConfig(dtype=preset.dtype, device=preset.device),
        seed=settings.seed,
    )
    with (
        patch.object(bench, "loaded", loaded),
        patch.object(bench, "context_of", lambda path: context),
        patch.object(bench, "model_folder", Path),
        patch.object(bench, "Worker", Here),
        Progress().bar(f"{split.active_experts} of {experts} experts") as update,
    ):
        record = bench.bench(config, update)
    print(to_markdown(bench.table(record)))
    return record | {"format": settings.format, "granularity": asdict(split)}


def in_vllm(settings: Settings, preset: Preset, dense: DenseModel, experts: int) -> dict[str, Any]:
    """The same in vLLM, one model after the other."""
    split = resolve(ExpertsConfig(experts=experts, active=settings.active), preset.shape.ffn_width)
    found: dict[str, Any] = {"format": settings.format, "granularity": asdict(split)}
    steps = (settings.context_tokens, settings.decode_steps, settings.rounds)
    numbers = (*steps, *(settings.batch_sizes or preset.batch_sizes))
    script = str(Path(__file__).with_name("vllm_speed.py"))
    models = {"dense": dense.model, "moe": random_moe(dense, split, settings.format)}
    environment = os.environ | ENVIRONMENT
    for name, model in models.items():
        with TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            command = [str(settings.vllm_python), script, folder, preset.dtype, *map(str, numbers)]
            output = subprocess.check_output(command, env=environment)
        found[name] = json.loads(output.splitlines()[-1])
        print(experts, name, found[name], flush=True)
    return found


def random_moe(dense: DenseModel, split: Granularity, form: str) -> Any:
    """The model that an export of a split to a format would load as, with random weights."""
    dtype = next(dense.model.parameters()).dtype
    header = FORMATS[form].config(dense, split, str(dtype).removeprefix("torch."))
    config = AutoConfig.for_model(header.pop("model_type"), **header)
    with default_dtype(dtype), torch.device(dense.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.requires_grad_(False).eval()


class Here(ExitStack):
    """A runner of a model in this process, in place of a worker process."""

    def __init__(self, target: str, *arguments: Any, **names: str) -> None:
        super().__init__()
        self.runner = TransformersRunner(*arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Result of calling a method of the runner."""
        return getattr(self.runner, method)(*arguments)


if __name__ == "__main__":
    main()
