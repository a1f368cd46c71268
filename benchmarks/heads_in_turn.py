"""FFN and attention aligned jointly or one after the other: loss of each, frozen and repaired.

    python benchmarks/heads_in_turn.py --out results/heads_in_turn.json
    python benchmarks/heads_in_turn.py --out FILE --model GGUF --data TEXT --eval-text HELDOUT \
        --expert-size 32 --active 0.75 --active-attention 0.67 --dtype bfloat16 --steps 24 \
        --lr 2e-3 --no-longer

Three ways from the same start, with the same batches and routers: both at once; FFNs for half of
the steps and then attention under the masks of these FFNs; and the same with the full number of
steps for each. All are measured on held-out text, and so is the unchanged start. On one core a seed
takes a few minutes for the embedded model and twenty for one of 135M parameters.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
import tyro

from dotmoe.align import AlignConfig, Alignment, align
from dotmoe.calibrate import calibrate
from dotmoe.config import RunConfig, recipe
from dotmoe.evaluate.perplexity import heldout_perplexity
from dotmoe.finetuning import MODEL
from dotmoe.finetuning.repair import RepairConfig, repair
from dotmoe.granularity import ExpertsConfig, Granularity, joined, parts_of, splits_of
from dotmoe.layout import AlignState, extract
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.family import DenseModel
from dotmoe.moe.masked import masked_by
from dotmoe.progress import Progress
from dotmoe.tokenise import Text, tokenise
from dotmoe.training.loop import ParameterGroup
from rounds import keep


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    model: str = "embedded"
    data: tuple[str, ...] = ("python-stdlib",)
    eval_text: tuple[str, ...] = ("python-stdlib-heldout",)
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int = 150
    lr: float = 1e-2
    longer: bool = True
    """Also align in turn with `steps` steps for each instead of half."""
    seeds: tuple[int, ...] = (0, 1, 2)
    expert_size: int = 16
    active: float = 0.5
    heads_per_expert: int = 3
    active_attention: float = 0.5
    repair_tokens: int | None = None
    eval_tokens: int = 16_384
    threads: int = 1
    out: Path = Path("results/heads_in_turn.json")


class AttentionAlone(Alignment):
    """Alignment of attention alone, under the masks of FFNs with fixed experts and routers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        ffn, tau = self.parts[0], self.parts[0].assignment.tau_end
        ffn.config = replace(ffn.config, learn_assignment=False)
        ffn.masking.expert_of_neuron_LN = ffn.rounded(ffn.plan(tau))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Parameter groups of attention alone."""
        return self.parts[1].parameter_groups()


class Model:
    """A dense model and its text, with ways to align, extract and measure it."""

    def __init__(self, settings: Settings, seed: int, folder: Path) -> None:
        self.settings, self.seed, self.folder = settings, seed, folder
        experts = ExpertsConfig(
            expert_size=settings.expert_size,
            active=settings.active,
            targets="both",
            heads_per_expert=settings.heads_per_expert,
            active_attention=settings.active_attention,
        )
        base = recipe("quickstart")
        self.config: RunConfig = replace(
            base,
            experts=experts,
            data=replace(base.data, data=settings.data),
            align=replace(base.align, lr=settings.lr, lr_router=settings.lr),
            load=LoadConfig(dtype=settings.dtype),
            repairing=RepairConfig(repair_tokens=settings.repair_tokens, repair_epochs=0),
            seed=seed,
        )
        self.dense: DenseModel = load_dense(settings.model, self.config.load)
        heads = self.dense.config.num_attention_heads
        self.split = splits_of(experts, self.dense.widths.ffn, heads)
        self.text: Text = tokenise(
            self.config.data,
            self.config.sample,
            self.dense,
            folder,
            blocks=settings.steps * self.config.align.batch_size,
            min_tokens=self.config.repairing.tokens(self.split, self.dense.model.config),
            eval_text=settings.eval_text,
            eval_tokens=settings.eval_tokens,
            progress=Progress(),
        )
        self.start = calibrate(
            self.dense, self.text.training, self.split, self.config.calibrate, seed=seed
        )

    def aligned(
        self, start: AlignState, split: Granularity, steps: int, kind: type[Alignment] = Alignment
    ) -> AlignState:
        """State after `steps` alignment steps from a start."""
        config: AlignConfig = replace(self.config.align, steps=steps)
        task = kind(
            self.dense,
            self.text.training,
            start,
            split,
            config,
            self.config.assignment,
            seed=self.seed,
        )
        with tempfile.TemporaryDirectory() as folder:
            return align(task, Path(folder), self.config.training)

    def in_turn(self, steps: int) -> AlignState:
        """State after aligning FFNs for `steps` steps, then attention for as many."""
        ffn, attention = parts_of(self.start)
        ffn = self.aligned(ffn, parts_of(self.split)[0], steps)
        return self.aligned(joined([ffn, attention]), self.split, steps, AttentionAlone)

    def frozen(self, state: AlignState) -> float:
        """Nats per token of the dense weights under the masks of a state."""
        with masked_by(self.dense, extract(state, self.split, self.config.assignment)):
            return self.loss(self.dense)

    def repaired(self, state: AlignState) -> float:
        """Nats per token of the weights refitted under the masks of a state."""
        layout = extract(state, self.split, self.config.assignment)
        with tempfile.TemporaryDirectory() as folder:
            text = self.text.training
            repair(self.dense, layout, text, self.config.repairing, folder=Path(folder))
            refitted = load_dense(str(Path(folder) / MODEL), self.config.load)
        with masked_by(refitted, layout):
            return self.loss(refitted)

    def loss(self, dense: DenseModel) -> float:
        """Nats per token of a model on the held-out text."""
        texts = {self.text.heldout_name: self.text.heldout}
        return float(heldout_perplexity(dense.model, dense.tokenizer, texts)["loss"])


def measured(settings: Settings) -> dict[str, Any]:
    """Losses above dense of each way, by seed."""
    steps, by_seed = settings.steps, list[dict[str, dict[str, float]]]()
    for seed in settings.seeds:
        with tempfile.TemporaryDirectory() as folder:
            model = Model(settings, seed, Path(folder))
            dense = model.loss(model.dense)
            found = {"start, as it is": {"frozen": model.frozen(model.start) - dense}}
            ways: dict[str, Callable[[], AlignState]] = {
                f"jointly, {steps} steps": partial(model.aligned, model.start, model.split, steps),
                f"in turn, {steps // 2} steps each": partial(model.in_turn, steps // 2),
            }
            if settings.longer:
                ways[f"in turn, {steps} steps each"] = partial(model.in_turn, steps)
            for way, aligned in ways.items():
                state = aligned()
                found[way] = {
                    "frozen": model.frozen(state) - dense,
                    "repaired": model.repaired(state) - dense,
                }
                print(seed, way, found[way], flush=True)
            by_seed.append(found)
    rows = []
    for way in by_seed[0]:
        row: dict[str, Any] = {"way": way}
        for weights in by_seed[0][way]:
            losses = [found[way][weights] for found in by_seed]
            row |= {f"{weights}_nats_above_dense": fmean(losses), f"{weights}_by_seed": losses}
        rows.append(row)
    said = {
        name: [Path(each).name for each in value] if name in ("data", "eval_text") else value
        for name, value in asdict(settings).items()
        if name not in ("out", "threads")
    }
    return {"settings": said | {"model": Path(settings.model).name}, "rows": rows}


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(settings.threads)
    keep(settings.out, measured(settings))


if __name__ == "__main__":
    main()
