"""Sources of a conversion's loss: neurons, grouping, routing; and what repair and training recover.

    python benchmarks/decomposition.py OUT.json RUN --text A.txt B.txt [--finetuned RUN2]

Every row runs as many neurons per token as the conversion does, and each adds one part of the
method. With the dense weights: the neurons with the largest terms in the FFN output, individually;
the run's experts, chosen by the energy of their terms; and the experts that its routers choose.
Then with the run's own weights, and with those of its finetuning.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from tyro.conf import Positional

from dotmoe.calibrate import expert_sums
from dotmoe.evaluate.models import TextConfig
from dotmoe.evaluate.perplexity import packed_text
from dotmoe.files import write_json
from dotmoe.finished_run import FinishedRun
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.family import DenseModel
from dotmoe.moe.masked import input_hooks, masked_by, neuron_mask
from dotmoe.run_folder import provenance

Way = Callable[[DenseModel, ExpertLayout], AbstractContextManager[None]]
"""Context manager in which the model runs what one row measures, for each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A finished conversion of FFNs, and texts that it was not trained on."""

    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")]
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    text: tuple[str, ...]
    finetuned: Path | None = None
    """Run folder of a finetuning of RUN."""
    tokens: int = 4_096
    """Tokens to score of each text."""
    window: int = 512


def best_neurons(energy_TN: Tensor, layout: ExpertLayout, layer: int) -> Tensor:
    """Mask of the neurons of largest energy, as many as the layout runs, [T, N]."""
    best_TK = energy_TN.topk(layout.granularity.active_units, dim=1).indices
    return torch.zeros_like(energy_TN).scatter_(1, best_TK, 1.0)


def best_experts(energy_TN: Tensor, layout: ExpertLayout, layer: int) -> Tensor:
    """Mask of the experts of largest energy and of what always runs, [T, N]."""
    owner_N = layout.expert_of_neuron_LN[layer]
    sums_TE = expert_sums(energy_TN, owner_N, layout.num_experts)
    return neuron_mask(sums_TE.topk(layout.active_experts, dim=1).indices, layout, layer)


def chosen_by(mask_of: Callable[[Tensor, ExpertLayout, int], Tensor]) -> Way:
    """A `Way` that masks each FFN by the energy of its neurons' terms in the output."""

    def way(dense: DenseModel, layout: ExpertLayout) -> AbstractContextManager[None]:
        layers = dense.family.layers(dense.model)
        downs = {i: dense.family.ffn(layers[i]).down for i in layout.moe_layers}

        def keep(layer: int, hidden: Tensor) -> Tensor:
            energy_TN = (hidden.flatten(0, -2) * downs[layer].weight.norm(dim=0)).square()
            return hidden * mask_of(energy_TN, layout, layer).view_as(hidden)

        return input_hooks(downs, keep)

    return way


def log_probabilities(dense: DenseModel, tokens_T: Tensor) -> Tensor:
    """Log-probabilities of every next token, [T, V]."""
    output: Any = dense.model(input_ids=tokens_T[None], use_cache=False)
    return F.log_softmax(output.logits[0].float(), dim=-1)


@torch.no_grad()
def main() -> None:
    settings, load = tyro.cli(Settings, description=__doc__), LoadConfig(device="cpu")
    run = FinishedRun(settings.run)
    origin, layout = load_dense(run.model, load), run.layout
    rows: dict[str, tuple[DenseModel, ExpertLayout, Way]] = {
        "best neurons": (origin, layout, chosen_by(best_neurons)),
        "best experts": (origin, layout, chosen_by(best_experts)),
        "experts by router": (origin, layout, masked_by),
    }
    for name, folder in (("repaired", settings.run), ("finetuned", settings.finetuned)):
        if folder is not None:
            made = FinishedRun(folder)
            rows[name] = load_dense(made.weights, load), made.layout, masked_by
    found: dict[str, dict[str, Any]] = {name: {} for name in rows}
    for text in settings.text:
        asked = TextConfig(text=(text,), max_tokens=settings.tokens)
        tokens = packed_text(asked, origin.tokenizer).tokens.long()
        windows = torch.split(tokens, settings.window)
        kl, lost = dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0.0)
        for tokens_T in windows:
            exact_TV = log_probabilities(origin, tokens_T)
            for name, (dense, of, way) in rows.items():
                with way(dense, of):
                    actual_TV = log_probabilities(dense, tokens_T)
                kl[name] += float(F.kl_div(actual_TV, exact_TV, log_target=True, reduction="sum"))
                nats_TV = (exact_TV - actual_TV)[:-1]
                lost[name] += float(nats_TV.gather(1, tokens_T[1:, None]).sum())
        for name, measured in found.items():
            above = lost[name] / (len(tokens) - len(windows))
            measured[Path(text).stem] = {"kl": kl[name] / len(tokens), "nats_above_dense": above}
    write_json(
        settings.out,
        {
            "origin": "measured",
            "split": {
                name: getattr(layout.granularity, name)
                for name in ("num_experts", "expert_size", "active_experts", "shared_size")
            },
            "rows": found,
            "provenance": provenance(0),
        },
    )


if __name__ == "__main__":
    main()
