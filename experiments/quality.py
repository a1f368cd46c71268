"""Worth of each part of the method: how close the model stays to its dense one, row by row.

    python experiments/quality.py OUT --seed 0
    python experiments/quality.py OUT --model GGUF --data TEXT --eval-text A --other-text B \
        --expert-size 32 --active 0.5 --shared 0.25 --first-dense-layers 1 --seq-len 512 \
        --batch-size 2 --steps 24 --lr 2e-3 --rows "paper's recipe" start repaired

All rows have the same budget, text and batches; the paper's recipe, our alignment and the
finetuning take equally many steps. Measured on held-out text of the training domain and of another
domain. Runs are kept in OUT, and a stopped run is resumed. Writes OUT/quality.json.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dotmoe import convert, finetune, finetune_recipe, recipe
from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json, write_json
from dotmoe.common.options import ARGUMENT
from dotmoe.common.progress import Progress
from dotmoe.measure.config import EvaluateConfig, TextConfig
from dotmoe.measure.evaluate import evaluate
from dotmoe.measure.evaluate.difference import difference
from dotmoe.method.config import ExpertsConfig, RepairConfig
from dotmoe.models.config import LoadConfig
from dotmoe.run.config import RunConfig
from dotmoe.run.provenance import provenance

DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
REPAIRS = {"repaired": 0, "repaired, trained": 5}
"""Epochs of training all projections in a repair, for our start and for every rival."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One model, one budget, one seed."""

    out: Annotated[Path, ARGUMENT]
    """Folder to write."""
    model: str = "embedded"
    data: tuple[str, ...] = ("python-stdlib",)
    eval_text: tuple[str, ...] = ("python-stdlib-heldout",)
    other_text: tuple[str, ...] = ()
    """Held-out text of another domain. Default: the documents of this project."""
    eval_tokens: int = 8_192
    """Tokens to score of each text."""
    expert_size: int = 16
    active: float = 0.25
    shared: float = 0.125
    """Size of the shared expert, for rows that have one."""
    seq_len: int = 256
    first_dense_layers: int = 0
    steps: int = 300
    batch_size: int = 4
    lr: float = 1e-2
    """Learning rate of our alignment; the paper's recipe has its own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    repair_tokens: int | None = None
    rivals: tuple[str, ...] = ("random_split", "co_activation", "llama_moe_v2")
    rows: tuple[str, ...] = ()
    """Rows to make, which must include the paper's recipe. Default: all."""
    seed: int = 0

    def wants(self, row: str) -> bool:
        """Whether to make a row."""
        return not self.rows or row in self.rows

    @property
    def load(self) -> LoadConfig:
        """Number format of all runs."""
        return LoadConfig(dtype=self.dtype)


def conversions(settings: Settings, other: tuple[str, ...]) -> dict[str, RunConfig]:
    """Configs of all rows except the finetuned ones."""
    size: dict[str, Any] = {"batch_size": settings.batch_size, "max_epochs": 100.0}
    ours, paper = recipe("quickstart"), recipe("paper")
    start = replace(
        ours,
        model=settings.model,
        experts=ExpertsConfig(
            expert_size=settings.expert_size,
            active=settings.active,
            shared=0.0,
            first_dense_layers=settings.first_dense_layers,
        ),
        data=replace(ours.data, data=settings.data, seq_len=settings.seq_len),
        align=replace(ours.align, steps=0, lr=settings.lr, lr_router=settings.lr, **size),
        load=settings.load,
        eval_text=settings.eval_text,
        other_text=other,
        eval_tokens=settings.eval_tokens,
        seed=settings.seed,
    )

    def repaired(run: RunConfig, epochs: int = 0) -> RunConfig:
        how = RepairConfig(repair_tokens=settings.repair_tokens, repair_epochs=epochs)
        return replace(run, repair=True, repairing=how)

    own = replace(start.baseline, split_router="ridge")
    shared = replace(start.experts, shared=settings.shared)
    rows = {
        "paper's recipe": replace(
            start,
            calibrate=paper.calibrate,
            assignment=paper.assignment,
            align=replace(paper.align, steps=settings.steps, **size),
        ),
        "start": start,
        "start, aligned": replace(start, align=replace(start.align, steps=settings.steps)),
        "start, shared expert": replace(start, experts=shared),
        "repaired, shared expert": repaired(replace(start, experts=shared)),
        **{name: repaired(start, epochs) for name, epochs in REPAIRS.items()},
        **{
            f"{rival}, {name}": repaired(replace(start, method=rival, baseline=own), epochs)
            for rival in settings.rivals
            for name, epochs in REPAIRS.items()
        },
    }
    require_different(rows)
    return rows


def require_different(rows: dict[str, RunConfig]) -> None:
    """Raise a `UserError` if two rows would be one conversion under two names."""
    names = list(rows)
    for index, name in enumerate(names):
        for other in names[:index]:
            if rows[name] == rows[other]:
                raise UserError(
                    f"rows {other!r} and {name!r} would be the same conversion. Change --shared."
                )


def closeness(run: Path, settings: Settings, texts: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """KL divergence to the dense model, and loss above it, on each text."""
    results, found = read_json(run / "6_evaluate/results.json"), dict[str, Any]()
    for name, text in texts.items():
        file = run / "6_evaluate" / name / "fidelity.json"
        if not file.exists():
            config = EvaluateConfig(
                model=str(run),
                against=settings.model,
                fidelity=True,
                corpus=TextConfig(text=text, max_tokens=settings.eval_tokens),
                load=settings.load,
                out=str(file.parent),
            )
            evaluate(config, Progress())
        moe, dense = (
            results[each] if name == "domain" else results[each]["other"]
            for each in ("moe", "dense")
        )
        above, _ = difference(moe, dense)
        found[name] = {"kl": read_json(file)["kl"], "nats_above_dense": above}
    return found


def documents(folder: Path) -> Path:
    """Our own documents as one file of text in a folder."""
    prose = folder / "documents.txt"
    pages = (page.read_text(encoding="utf-8") for page in sorted(DOCUMENTS.rglob("*.md")))
    prose.write_text("\n".join(pages), encoding="utf-8")
    return prose


def main() -> None:
    settings = settings_of(Settings, __doc__)
    settings.out.mkdir(parents=True, exist_ok=True)
    other = settings.other_text or (str(documents(settings.out)),)
    texts = {"domain": settings.eval_text, "other": other}
    rows: dict[str, dict[str, Any]] = {}

    def out(row: str) -> Path:
        return settings.out / row.replace("'", "").replace(", ", "-").replace(" ", "_")

    for row, config in conversions(settings, other).items():
        if not settings.wants(row):
            continue
        print(f"{row}:", flush=True)
        convert(replace(config, out=str(out(row))))
        rows[row] = closeness(out(row), settings, texts)
    for source in REPAIRS:
        row = f"{source}, finetuned"
        if not settings.wants(row):
            continue
        print(f"{row}:", flush=True)
        tuning = finetune_recipe("small", run=str(out(source)), out=str(out(row)))
        steps = replace(tuning.finetune, steps=settings.steps, batch_size=settings.batch_size)
        data = replace(tuning.data, seq_len=settings.seq_len)
        tuning = replace(tuning, finetune=steps, data=data, load=settings.load, seed=settings.seed)
        finetune(tuning)
        rows[row] = closeness(out(row), settings, texts)
    for measured in rows.values():
        for name, found in measured.items():
            found["share_of_paper"] = found["kl"] / rows["paper's recipe"][name]["kl"]
    record = {
        "origin": "measured",
        "model": Path(settings.model).name,
        "tokens": settings.steps * settings.batch_size * settings.seq_len,
        "rows": rows,
        "provenance": provenance(settings.seed),
    }
    write_json(settings.out / "quality.json", record)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
