"""Error of single split layers on the dense model's own inputs, one layer at a time.

    python experiments/single_layer.py RUN OUT --active-experts 5

Uses model, text and expert size of RUN, a finished conversion. Every method splits each layer as
if all others stayed dense, with its own router, CMoE's as published. `dotmoe` is its start from
data, and that start trained on the layer alone: affinities and router minimise the squared error of
the FFN's output, with plan, rounding and estimators as in the alignment. Errors are means over
held-out tokens: squared error per component, and the same over the dense output's mean square.
Writes OUT/layers.json.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.files import write_json
from dotmoe.common.options import ARGUMENT
from dotmoe.method.align import Alignment
from dotmoe.method.calibrate import block_inputs, calibrate
from dotmoe.method.extract import Extracted, extract
from dotmoe.method.layout import ExpertLayout
from dotmoe.method.masked import masked, masked_by
from dotmoe.method.router import dense_only, router_losses
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks
from dotmoe.models.load import load_dense
from dotmoe.rivals.baselines import METHODS, SplitInputs, granularity_of, routed_by_own
from dotmoe.run.config import RunConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.provenance import provenance
from dotmoe.training.loop import train

RIVALS = ("cmoe", "llama_moe_v2", "random_split")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One conversion, and which layers of it to measure."""

    run: Annotated[Path, ARGUMENT]
    """Run folder of a finished conversion."""
    out: Annotated[Path, ARGUMENT]
    """Folder to write."""
    active_experts: int
    """Experts that run per token (k)."""
    layers: tuple[int, ...] = ()
    """Layers to measure; default: all."""
    steps: int = 300
    """Steps of training each layer on its own, all in parallel; 0: the start alone."""
    heldout_tokens: int = 16_384
    """Tokens to measure on."""
    seed: int = 0


class LayerByLayer(Alignment):
    """Alignment in which each layer learns its dense FFN's output for the dense model's input."""

    layers: tuple[int, ...]

    def losses(
        self, tokens_BT: Tensor, counted_P: Tensor | None = None, weight: float = 1.0
    ) -> dict[str, Tensor]:
        """Sum over layers of the relative squared error, plus z-loss and balance loss."""
        modules, total = self.dense.family.layers(self.dense.model), torch.zeros(())
        ffns = {index: modules[index].get_submodule("mlp") for index in self.layers}
        inputs: dict[int, Tensor] = {}
        with input_hooks(ffns, inputs.__setitem__), torch.no_grad():
            self.teacher(tokens_BT)
        with router_losses() as routers:
            for index, x_BTD in inputs.items():
                ffn: Any = modules[index].get_submodule("mlp")
                with dense_only(), torch.no_grad():
                    target = ffn(x_BTD)
                error = (ffn(x_BTD) - target).float().square().mean()
                total = total + error / target.float().square().mean()
        of_routers, weights = routers(), self.config.router_loss_weights
        loss = total + sum(weights[name] * value for name, value in of_routers.items())
        return {"loss": loss, "kl": total, "ce": total, **of_routers}


def main() -> None:
    settings = settings_of(Settings, __doc__)
    found = FinishedRun(settings.run)
    config = found.config
    assert isinstance(config, RunConfig)
    dense = load_dense(found.model, LoadConfig(dtype="float32"))
    text, k = found.text, settings.active_experts
    split = replace(found.layouts[0].granularity, active_experts=k)
    layers = settings.layers or tuple(range(dense.widths.layers))
    settings.out.mkdir(parents=True, exist_ok=True)
    rows = text.heldout.tokens_BT[: max(1, settings.heldout_tokens // text.heldout.seq_len)]
    inputs_of = (x_TD for x_TD, _ in block_inputs(dense, rows))
    inputs = [x if i in layers else x[:0] for i, x in enumerate(inputs_of)]

    def errors(inside: Callable[[], AbstractContextManager[Any]]) -> Iterator[dict[str, float]]:
        modules = dense.family.layers(dense.model)
        for index in layers:
            part_TD = torch.split(inputs[index], 4_096)
            with torch.no_grad():
                target = torch.cat([modules[index].get_submodule("mlp")(x) for x in part_TD])
                with inside():
                    ffn = modules[index].get_submodule("mlp")
                    output = torch.cat([ffn(x[None])[0] for x in part_TD])
            error, power = (float(each.square().mean()) for each in (output - target, target))
            yield {"layer": index, "mse": error, "relative_mse": error / power}

    start = calibrate(
        dense, text.training, split, config.calibrate, config.assignment, seed=settings.seed
    )
    before = extract(start, split, config.assignment)
    methods = {"dot_moe_untrained": list(errors(lambda: masked_by(dense, before)))}
    if settings.steps:
        align = replace(config.align, steps=settings.steps)
        task = LayerByLayer(
            dense, text.training, (start,), (split,), align, config.assignment, seed=settings.seed
        )
        task.layers = layers
        with masked(dense, task.maskings):
            train(task, settings.out, on_step=_say)
        after = extract(task.learned()[0], split, config.assignment)
        methods["dot_moe"] = list(errors(lambda: masked_by(dense, after)))
    for method in RIVALS:
        made = _split(method, dense, found, settings)

        def inside(method: str = method, made: Extracted = made) -> AbstractContextManager[Any]:
            if made.own_router:
                return routed_by_own(method, dense, made)
            return masked_by(dense, made.layout)

        methods[method] = list(errors(inside))
    record = {
        "origin": "measured",
        "methods": methods,
        "active": split.active_fraction,
        "tokens": rows.numel(),
        "steps": settings.steps,
        "provenance": provenance(seed=settings.seed),
    }
    write_json(settings.out / "layers.json", record)
    for method, result in methods.items():
        print(method, [f"{one['relative_mse']:.4f}" for one in result], flush=True)


def _split(method: str, dense: DenseModel, found: FinishedRun, settings: Settings) -> Extracted:
    """A method's split of every layer, each on the dense model's inputs."""
    config = found.config
    assert isinstance(config, RunConfig)
    split = replace(found.layouts[0].granularity, active_experts=settings.active_experts)
    split = granularity_of(method, split)
    inputs = SplitInputs(
        dense=dense,
        tokens_BT=found.text.training.drawn(config.calibrate.tokens(dense.widths.model)),
        # CMoE calibrates behind converted layers; here all other layers are dense.
        granularity=replace(split, first_dense_layers=dense.widths.layers),
        config=config.baseline,
        calibrate=config.calibrate,
        seed=settings.seed,
    )
    with torch.no_grad():
        made = list(METHODS[method].split(inputs))
    own_router = {name: torch.stack([one.own[name] for one in made]) for name in made[0].own}
    return Extracted(
        layout=ExpertLayout(
            expert_of_neuron_LN=torch.stack([one.expert_of_neuron_N for one in made]),
            router_LED=torch.stack([one.router_ED.float() for one in made]),
            active_experts=split.active_experts,
        ),
        own_router=own_router or None,
    )


def _say(step: int, metrics: Any) -> None:
    if step % 30 == 0:
        print(step, f"{metrics['kl']:.4f}", flush=True)


if __name__ == "__main__":
    main()
