"""Stage analyse: how evenly tokens use the experts of a finished run."""

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.common.files import Values, write_json
from dotmoe.common.options import checked
from dotmoe.common.progress import Progress, Update, no_update
from dotmoe.export.record import say_unread_edits
from dotmoe.export.routers import at_routers
from dotmoe.measure.config import AnalyseConfig
from dotmoe.method.layout import ExpertLayout, Layouts
from dotmoe.method.router import router_logits
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.identity import FINGERPRINT
from dotmoe.models.load import load_described
from dotmoe.run.finished import FinishedRun
from dotmoe.run.provenance import provenance

UTILISATION = "expert_utilisation"
"""Name of the result, and of its file in `6_evaluate/analysis`."""
UNEVEN_SHARE_OF_LIMIT = 0.5
"""A load is uneven if its coefficient of variation exceeds this share of the maximum possible."""
FORWARD_TOKENS = 4096
"""Maximum tokens of one forward pass; a single block may have more."""


def analyse(config: AnalyseConfig, progress: Progress | None = None) -> Values:
    """Measure the load of a run's experts on its held-out text (fig:expert_utilization); write it.

    Returns the contents of the file. Its `values`: share of the tokens that run each expert (sums
    to k), statistics by layer, warnings. If FFNs and attention are split, `attention` holds the
    same values for attention. Raises a `UserError` if the run is not finished, a number is out of
    range, or another process works in the run folder.
    """
    config = checked(config)
    progress = progress or Progress(quiet=True)
    run = FinishedRun(Path(config.run))
    say_unread_edits(run.folder.path_of("export"), "the load")
    with run.folder.alone():
        heldout = run.text.heldout
        tokens_BT = heldout.tokens_BT[: max(1, config.tokens // heldout.seq_len)]
        dense = load_described(run.described(), config.load)
        with progress.bar("route held-out text") as update:
            routes = captured_routes(dense, run.layouts, tokens_BT, update)
        (values, sentences), *attention = (
            load_of(layout, routes[layout.target]) for layout in run.layouts
        )
        for of_heads, more in attention:
            values["attention"] = of_heads
            sentences += more
        result = {
            "analysis": UTILISATION,
            "origin": "measured",
            "name": config.run,
            FINGERPRINT: run.fingerprints["experts"],
            "title": "Share of the tokens that run each expert",
            "tokens": tokens_BT.numel(),
            "text": list(run.text.heldout_name),
            "values": values,
            "says": sentences,
            "provenance": provenance(0, config.load.device),
        }
        write_json(run.folder.path_of("evaluate") / "analysis" / f"{UTILISATION}.json", result)
    return result


def captured_routes(
    dense: DenseModel,
    layouts: Layouts,
    tokens_BT: Int[Tensor, "B T"],
    on_progress: Update = no_update,
) -> dict[str, Int[Tensor, "L T K"]]:
    """Experts that run for each token in each split layer, by target; int16, on the CPU.

    The expert with the largest logit is first (eq:router_topk). Rows are independent sequences;
    `on_progress` receives the number of rows.
    """

    def routes(layout: ExpertLayout) -> Int[Tensor, "L T K"]:
        chosen: dict[int, list[Tensor]] = {layer: [] for layer in layout.moe_layers}

        def look(layer: int, x_TD: Tensor) -> None:
            logits_TE = router_logits(x_TD, layout.router_LED[layer].to(x_TD.device))
            chosen_TK = logits_TE.topk(layout.active_experts, dim=1).indices
            chosen[layer].append(chosen_TK.to(torch.int16).cpu())

        done = 0
        for rows in torch.split(tokens_BT, max(1, FORWARD_TOKENS // tokens_BT.shape[1])):
            at_routers(dense, layouts, rows, look, layout.target)
            done += len(rows)
            on_progress(done, len(tokens_BT))
        return torch.stack([torch.cat(parts) for parts in chosen.values()])

    return {layout.target: routes(layout) for layout in layouts}


def load_of(layout: ExpertLayout, routes_LTK: Int[Tensor, "L T K"]) -> tuple[Values, list[str]]:
    """Load of the experts by layer, and sentences that summarise it and warn."""
    loads = {}
    for layer, chosen_TK in zip(layout.moe_layers, routes_LTK, strict=True):
        counts_E = torch.bincount(chosen_TK.flatten().long(), minlength=layout.num_experts)
        loads[layer] = counts_E.double() / len(chosen_TK)
    statistics = [{"layer": layer} | load_statistics(share_E) for layer, share_E in loads.items()]
    warnings = [line for layer, share_E in loads.items() for line in warnings_of(layer, share_E)]
    spread = [layer["coefficient_of_variation"] for layer in statistics]
    summary = (
        f"coefficient of variation of a layer's load: {min(spread):.2f} to {max(spread):.2f}; "
        f"busiest expert: {max(layer['max_over_mean'] for layer in statistics):.2f} times its "
        f"layer's mean load, idlest: {min(layer['min_over_mean'] for layer in statistics):.2f}; "
        f"dead experts: {sum(len(layer['dead_experts']) for layer in statistics)}"
    )
    units = "query heads: " if layout.target == "attention" else ""
    values: Values = {
        "layers": list(loads),
        "share_LE": [share_E.tolist() for share_E in loads.values()],
        "num_experts": layout.num_experts,
        "active_experts": layout.active_experts,
        "target": layout.target,
        "statistics": statistics,
        "warnings": warnings,
    }
    sentences = [units + summary]
    sentences += [f"warning: {units}{warning}" for warning in warnings]
    return values, sentences


def load_statistics(share_E: Float[Tensor, " E"]) -> dict[str, Any]:
    """Statistics of the load of one layer, from the share of the tokens that run each expert.

    Returns:
        `coefficient_of_variation`: standard deviation over experts / mean; 0 is even, and the
        maximum, `sqrt(E / k - 1)`, means the same k experts for every token. `dead_experts`: load
        below 1 % of the mean. `always_on_experts`: load above 95 %, only if the mean is below 75 %
        (with k / E near 1 such loads are unavoidable). `entropy_normalised`: 1 is even.
    """
    average = float(share_E.mean())
    portion_E = share_E / share_E.sum()
    entropy = -float(torch.xlogy(portion_E, portion_E).sum())
    always = (share_E > 0.95).nonzero().flatten().tolist()
    return {
        "coefficient_of_variation": float(share_E.std(correction=0)) / average,
        "max_over_mean": float(share_E.max()) / average,
        "min_over_mean": float(share_E.min()) / average,
        "dead_experts": (share_E < 0.01 * average).nonzero().flatten().tolist(),
        "always_on_experts": always if average < 0.75 else [],
        "entropy_normalised": entropy / math.log(len(share_E)) if len(share_E) > 1 else 1.0,
    }


def warnings_of(layer: int, share_E: Float[Tensor, " E"]) -> list[str]:
    """One line for each rule that a layer breaks: dead experts, always-on experts, uneven load."""
    statistics = load_statistics(share_E)
    lines = []
    rules = {
        "dead_experts": "are dead (less than 1 % of the mean load)",
        "always_on_experts": "run for more than 95 % of the tokens, so routing barely affects them",
    }
    for name, wrong in rules.items():
        if experts := statistics[name]:
            shown = ", ".join(map(str, experts[:8]))
            if len(experts) > 8:
                shown += ", ..."
            of = f"{len(experts)} of {len(share_E)} experts"
            lines.append(f"layer {layer}: {of} {wrong}: {shown}")
    variation = statistics["coefficient_of_variation"]
    limit = math.sqrt(max(0.0, 1 / float(share_E.mean()) - 1))
    if variation > UNEVEN_SHARE_OF_LIMIT * limit > 0:
        lines.append(
            f"layer {layer}: the load is uneven: its coefficient of variation is {variation:.2f} "
            f"({limit:.2f} would mean the same experts for every token)"
        )
    return lines
