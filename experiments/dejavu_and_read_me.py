"""DejaVu and Read-ME under masks over single neurons: no MoE server can run either.

    python experiments/dejavu_and_read_me.py RUN OUT

RUN is a finished conversion by `dot_moe`; all rows have its text, sizes of experts and held-out
tokens. dotmoe's row is its start with the seed of this script. Only predictors and the gate are
fitted: to the tokens that calibration reads, predictors also to four times as many.

DejaVu: in each layer a predictor, two linear maps, scores all neurons for each token, and those of
the highest scores run. From the original: binary cross-entropy weighted by class, AdamW with decay
0.01, 5 % of the tokens held out, the pass with the best recall there is kept. Different here: SiLU
has no zeros, so a neuron counts as active if its term of the FFN's output is among the k largest of
its token, and always k run; the second map has a bias; rate, rank and patience are ours.

Read-ME: an expert is the neurons of largest mean energy on a domain of text, in all layers; experts
overlap, and what all have in common is stored once. One gate before all layers chooses an expert
for each token, and learns for which one most layers have most of the token's strongest neurons.
Different here: domains are clusters of passages, since the text has one source; the gate is a ridge
regression on the token's embedding and the mean of those before (the original: a small transformer,
trained on far more text); weights are not trained. With one domain it is static pruning.

Writes OUT/rows.json.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.files import write_json
from dotmoe.common.options import ARGUMENT
from dotmoe.measure.evaluate.difference import difference, nats_with_error
from dotmoe.measure.evaluate.perplexity import heldout_perplexity
from dotmoe.method.calibrate import RidgeRouter, block_inputs, calibrate, contributions, routed_sums
from dotmoe.method.extract import extract
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import ExpertLayout
from dotmoe.method.masked import masked_by
from dotmoe.method.router import top_k_mask
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks
from dotmoe.models.load import load_described
from dotmoe.models.stream import Stream
from dotmoe.rivals.baselines.contract import balanced_kmeans, gated
from dotmoe.run.config import RunConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.provenance import provenance

Choice = Callable[[int, Tensor, Tensor], Tensor]
"""From a layer's number, its FFN's input [T, D] and hidden activations [T, N], the mask that
multiplies the latter or its experts."""
TOKENS_A_STEP, MOST_PASSES, PATIENCE = 512, 20, 3
"""Tokens of a step of a predictor's training, most passes, and passes without gain that end it."""
PASSAGE = 64
"""Tokens of a passage, of which domains of text are clusters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One conversion, and the size of predictors and gate."""

    run: Annotated[Path, ARGUMENT]
    """Run folder of a finished conversion by `dot_moe`."""
    out: Annotated[Path, ARGUMENT]
    """Folder to write."""
    rank: int = 64
    """Width between a predictor's two maps."""
    domains: int = 8
    """Experts of Read-ME, as published."""
    lr: float = 2e-3
    seed: int = 0


def strongest(dense: DenseModel, split: Granularity) -> Choice:
    """A perfect predictor: the neurons whose terms of the FFN's output are largest."""
    layers = dense.family.layers(dense.model)
    norms_LN = [dense.family.ffn(layer).down.weight.float().norm(dim=0) for layer in layers]
    k = split.active_units
    return lambda layer, _, hidden_TN: top_k_mask(hidden_TN.float().abs() * norms_LN[layer], k)


def best_experts(dense: DenseModel, layout: ExpertLayout) -> Choice:
    """A perfect router: the experts whose neurons have most energy."""
    layers = dense.family.layers(dense.model)

    def choose(layer: int, x_TD: Tensor, _: Tensor) -> Tensor:
        energy_TN = contributions(dense.family.ffn(layers[layer]), x_TD).square_()
        experts_N = layout.expert_of_neuron_LN[layer]
        energy_TE = routed_sums(energy_TN, experts_N, layout.num_experts)
        return top_k_mask(energy_TE, layout.active_experts)

    return choose


def by_predictor(networks: Mapping[int, nn.Module], split: Granularity) -> Choice:
    """The neurons that a layer's predictor scores highest."""
    return lambda layer, x_TD, _: top_k_mask(networks[layer](x_TD), split.active_units)


def by_neuron(
    dense: DenseModel, layout: ExpertLayout, gate: Choice
) -> AbstractContextManager[None]:
    """Within this context, `gate` masks single neurons of the layers that `layout` splits."""
    each_N = torch.arange(layout.granularity.units)
    return gated(dense, dict.fromkeys(layout.moe_layers, each_N), gate)


def predictors(
    dense: DenseModel, layout: ExpertLayout, tokens_BT: Tensor, settings: Settings
) -> tuple[dict[int, nn.Module], int]:
    """DejaVu's predictors by number of the split layer; tokens times passes over all layers."""
    networks, read = dict[int, nn.Module](), 0
    for layer, (x_TD, energy) in enumerate(block_inputs(dense, tokens_BT)):
        if layer in layout.moe_layers:
            is_active_TN = top_k_mask(energy(), layout.granularity.active_units)
            torch.manual_seed(settings.seed + layer)
            networks[layer] = nn.Sequential(
                nn.Linear(x_TD.shape[1], settings.rank, bias=False),
                nn.Linear(settings.rank, is_active_TN.shape[1]),
            )
            read += trained(networks[layer], x_TD.float(), is_active_TN, settings)
    return networks, read


@torch.enable_grad()
def trained(network: nn.Module, x_TD: Tensor, is_active_TN: Tensor, settings: Settings) -> int:
    """Train a predictor in place; returns the tokens of all passes.

    Every 20th token is held out, and the pass that finds most active neurons there is kept.
    """
    k = int(is_active_TN[0].sum())
    is_heldout_T = torch.arange(len(x_TD)) % 20 == 0
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.lr, weight_decay=0.01)
    weight_TN = is_active_TN.clamp_min(k / is_active_TN.shape[1])
    most, last, passes = -1.0, 0, 0
    while passes - last < PATIENCE and passes < MOST_PASSES:
        passes += 1
        order_T = (~is_heldout_T).nonzero().squeeze(1)
        for part in torch.split(order_T[torch.randperm(len(order_T))], TOKENS_A_STEP):
            logits_TN, wanted_TN = network(x_TD[part]), is_active_TN[part]
            loss = F.binary_cross_entropy_with_logits(logits_TN, wanted_TN, weight_TN[part])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            chosen_TN = top_k_mask(network(x_TD[is_heldout_T]), k)
        found = float((chosen_TN * is_active_TN[is_heldout_T]).sum())
        if found > most:
            most, last, kept = found, passes, copy.deepcopy(network.state_dict())
    network.load_state_dict(kept)
    return passes * len(order_T)


def domain_masks(
    dense: DenseModel, layout: ExpertLayout, tokens_BT: Tensor, settings: Settings
) -> Float[Tensor, "L G N"]:
    """Masks of the neurons that run in each domain of text, for the split layers."""
    passages = tokens_BT.numel() // PASSAGE // settings.domains * settings.domains
    energies = list[Tensor]()
    for layer, (_, energy) in enumerate(block_inputs(dense, tokens_BT)):
        if layer in layout.moe_layers:
            energies.append(energy()[: passages * PASSAGE].view(passages, PASSAGE, -1).mean(dim=1))
    energy_LPN = torch.stack(energies)
    of_passage_P = torch.zeros(passages, dtype=torch.long)
    if settings.domains > 1:
        share_LPN = energy_LPN / energy_LPN.sum(dim=2, keepdim=True)
        generator = torch.Generator().manual_seed(settings.seed)
        features_PF = share_LPN.sqrt().transpose(0, 1).flatten(1)
        of_passage_P = balanced_kmeans(features_PF, settings.domains, generator)
    member_GP = F.one_hot(of_passage_P, settings.domains).T.to(energy_LPN)
    k = layout.granularity.active_units
    return torch.stack([top_k_mask(member_GP @ energy_PN, k) for energy_PN in energy_LPN])


def gate_inputs(x_BTD: Tensor) -> Float[Tensor, "T F"]:
    """What the gate reads: a token's embedding, the mean of those up to it, and 1."""
    x_BTD = F.normalize(x_BTD.float(), dim=-1)
    count_T1 = torch.arange(1, x_BTD.shape[1] + 1)[:, None]
    means_BTD, ones_BT1 = x_BTD.cumsum(dim=1) / count_T1, torch.ones_like(x_BTD[..., :1])
    return torch.cat([x_BTD, means_BTD, ones_BT1], dim=-1).flatten(0, 1)


def fitted_gate(
    dense: DenseModel, layout: ExpertLayout, tokens_BT: Tensor, masks_LGN: Tensor, ridge: float
) -> Float[Tensor, "G F"]:
    """The gate of all layers: rows that score each domain for the inputs of `gate_inputs`."""
    votes_TG = torch.zeros(tokens_BT.numel(), masks_LGN.shape[1])
    for layer, (_, energy) in enumerate(block_inputs(dense, tokens_BT)):
        if layer in layout.moe_layers:
            is_active_TN = top_k_mask(energy(), layout.granularity.active_units)
            best_T = (is_active_TN @ masks_LGN[layer - layout.moe_layers.start].T).argmax(dim=1)
            votes_TG += F.one_hot(best_T, votes_TG.shape[1])
    return RidgeRouter(gate_inputs(Stream(dense, tokens_BT).hidden_BTD), ridge)(votes_TG)


@contextmanager
def by_domain(
    dense: DenseModel, layout: ExpertLayout, masks_LGN: Tensor, gate_GF: Tensor
) -> Iterator[None]:
    """Within this context, each token runs the neurons of the domain that the gate prefers."""
    domain_T = torch.zeros(0)

    def choose(_: int, x_BTD: Tensor) -> None:
        nonlocal domain_T
        domain_T = (gate_inputs(x_BTD) @ gate_GF.T).argmax(dim=1)

    def mask(layer: int, x_TD: Tensor, hidden_TN: Tensor) -> Tensor:
        return masks_LGN[layer - layout.moe_layers.start][domain_T]

    first = dense.family.layers(dense.model)[0]
    with input_hooks({0: first}, choose), by_neuron(dense, layout, mask):
        yield


Row = tuple[str, AbstractContextManager[Any], dict[str, float]]
"""Name, the context in which the dense model is that row's, and what the row read and stores."""


def rows_of(found: FinishedRun, dense: DenseModel, settings: Settings) -> Iterator[Row]:
    """Yield all rows; `added` and `stored` are shares of the dense FFNs' weights."""
    config, text, split = found.config, found.text.training, found.layouts[0].granularity
    assert isinstance(config, RunConfig)
    start = calibrate(dense, text, split, config.calibrate, config.assignment, seed=settings.seed)
    layout, tokens = extract(start, split, config.assignment), config.calibrate.tokens
    few, more = (text.drawn(times * tokens(dense.widths.model)) for times in (1, 4))
    ffns = 3 * dense.widths.model * dense.widths.ffn * layout.num_layers
    yield "dense", nullcontext(), {}
    yield "single neurons, perfect predictor", by_neuron(dense, layout, strongest(dense, split)), {}
    in_experts = {layer: layout.expert_of_neuron_LN[layer] for layer in layout.moe_layers}
    best = gated(dense, in_experts, best_experts(dense, layout))
    yield "dotmoe's experts, perfect router", best, {}
    about = {"tokens_read": few.numel(), "added": layout.router_LED.numel() / ffns, "stored": 1.0}
    yield "dotmoe, frozen", masked_by(dense, layout), about
    for row, domains in (("static pruning", 1), ("Read-ME", settings.domains)):
        masks_LGN = domain_masks(dense, layout, few, replace(settings, domains=domains))
        gate_GF = fitted_gate(dense, layout, few, masks_LGN, config.calibrate.ridge)
        stored = masks_LGN.sum() - (domains - 1) * masks_LGN.prod(dim=1).sum()
        about = about | {"stored": float(stored) / masks_LGN[:, 0].numel()}
        has_gate = domains > 1
        about["added"] = gate_GF.numel() / ffns if has_gate else 0.0
        yield row, by_domain(dense, layout, masks_LGN, gate_GF), about
    for row, tokens_BT in (("DejaVu", few), ("DejaVu, more text", more)):
        networks, read = predictors(dense, layout, tokens_BT, settings)
        size = sum(p.numel() for network in networks.values() for p in network.parameters())
        about = {"tokens_read": tokens_BT.numel(), "added": size / ffns, "stored": 1.0}
        about["passes"] = read / tokens_BT.numel() / len(networks)
        yield row, by_neuron(dense, layout, by_predictor(networks, split)), about


def main() -> None:
    settings = settings_of(Settings, __doc__)
    found, rows = FinishedRun(settings.run), dict[str, dict[str, Any]]()
    dense = load_described(found.origin(), LoadConfig(dtype="float32"))
    heldout = {found.text.heldout_name: found.text.heldout}
    for row, within, about in rows_of(found, dense, settings):
        with torch.no_grad(), within:
            result = heldout_perplexity(dense.model, dense.tokenizer, heldout)
        above, stderr = difference(result, rows.get("dense", result))
        rows[row] = result | {"nats_above_dense": above, "stderr": stderr, **about}
        print(f"{row}: {nats_with_error(above, stderr, '.3f')} {about}", flush=True)
    record = {
        "origin": "measured",
        "rows": rows,
        "settings": {name: str(value) for name, value in asdict(settings).items()},
        "provenance": provenance(seed=settings.seed),
    }
    settings.out.mkdir(parents=True, exist_ok=True)
    write_json(settings.out / "rows.json", record)


if __name__ == "__main__":
    main()
