"""Recovery training of one conversion, with its held-out loss during training.

    python experiments/recovery_curve.py RUN OUT --text-of OTHER

`dotmoe finetune --recipe small` measures before and after; fig:effect_of_init needs a curve. This
script trains with the same stage and settings, on the training text of OTHER, so that several
conversions see the same batches, and measures at equal distances. Nothing is exported: the model is
the one that an export would hold, in float32. Writes OUT/curve.json, and the training loss of every
step to OUT/metrics.jsonl. A stopped run starts again from the beginning.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.distributed import fsdp_mesh
from dotmoe.common.files import write_json
from dotmoe.common.options import ARGUMENT, at_least
from dotmoe.measure.config import TextConfig
from dotmoe.measure.evaluate.models import stock_nats
from dotmoe.measure.evaluate.perplexity import packed_text, perplexity
from dotmoe.method.finetuning import Finetuning, Student
from dotmoe.method.masked import masked_by
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import load_described
from dotmoe.models.meta_model import meta_model
from dotmoe.run.config import finetune_recipe
from dotmoe.run.finished import FinishedRun
from dotmoe.run.provenance import provenance
from dotmoe.text.blocks import TokenBlocks
from dotmoe.text.overlap import write_decontaminated
from dotmoe.training.loop import train

HELDOUT = ("python-stdlib-heldout",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One conversion, the text it is trained on, and how often to measure it."""

    run: Annotated[Path, ARGUMENT]
    """Run folder of a finished conversion."""
    out: Annotated[Path, ARGUMENT]
    """Folder to write."""
    text_of: Path
    """Run folder whose training text is used."""
    points: Annotated[int, at_least(1)] = 5
    """Number of measurements after the start, at equal distances."""
    heldout_tokens: int = 16_384
    """Tokens of held-out text to measure on."""


class Heldout:
    """Measures a model, with its current FFNs, always on the same held-out text."""

    def __init__(self, dense: DenseModel, max_tokens: int) -> None:
        self.dense = dense
        self.config = TextConfig(text=HELDOUT, max_tokens=max_tokens)
        self.text = packed_text(self.config, dense.tokenizer)

    def measured(self) -> dict[str, Any]:
        """Loss and perplexity, with their protocol."""
        window = self.config.window_in(self.dense.widths.context)
        return perplexity(stock_nats(self.dense.model), self.text, window)


def main() -> None:
    settings = settings_of(Settings, __doc__)
    shutil.rmtree(settings.out, ignore_errors=True)
    settings.out.mkdir(parents=True)
    found = FinishedRun(settings.run)
    config = finetune_recipe("small").finetune
    load = LoadConfig(dtype="float32")
    dense = load_described(found.described(), load)
    training = FinishedRun(settings.text_of).text.training
    text_file = settings.out / "text.safetensors"
    left_out = write_decontaminated(training, found.text.heldout, text_file)
    training = TokenBlocks.load(text_file)
    heldout = Heldout(dense, settings.heldout_tokens)
    dense_result = heldout.measured()
    with masked_by(dense, *found.layouts):
        start = heldout.measured()
    points: list[dict[str, Any]] = []
    recent: list[float] = []

    def add_point(step: int, result: Mapping[str, Any]) -> None:
        point = {"step": step, "tokens": step * config.batch_size * training.seq_len}
        point |= {name: result[name] for name in ("loss", "perplexity")}
        points.append(point | {"training_ce": sum(recent) / len(recent) if recent else None})
        recent.clear()
        print(points[-1], flush=True)

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        recent.append(metrics["ce"])
        if step % steps_between == 0:
            add_point(step, student(heldout.measured))

    steps_between = max(1, config.steps // settings.points)
    add_point(0, start)
    described = found.described()
    model = meta_model(described.config, torch.float32)
    described = replace(described, model=model, weights="meta")
    with fsdp_mesh(torch.device("cpu"), shard=False) as ranks:
        student = Student(described, found.layouts[0], config, ranks, seed=0)
        heldout.dense = student.dense
        task = Finetuning(student, dense, training, config, seed=0)
        train(task, settings.out, on_step=on_step)
    shutil.rmtree(settings.out / "checkpoints", ignore_errors=True)
    record = {
        "origin": "measured",
        "points": points,
        "dense": dense_result,
        "protocol": start["protocol"],
        "left_out_blocks": left_out,
        "finetune": asdict(config),
        "provenance": provenance(seed=0),
    }
    write_json(settings.out / "curve.json", record)


if __name__ == "__main__":
    main()
