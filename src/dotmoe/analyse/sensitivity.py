"""What the split of one layer costs by itself: whether layers should have stayed dense."""

from typing import Any

import torch

from dotmoe.analyse.run import FORWARD_TOKENS, AnalysedRun
from dotmoe.evaluate.models import stock_nats
from dotmoe.load import load_dense
from dotmoe.moe.masked import masked, maskings_of

TOKENS = 4096
"""Of the analysed text at most, since each layer takes a forward pass of it."""


def values(run: AnalysedRun) -> dict[str, Any]:
    """Nats a token above the dense model with one layer split, `alone_L`, and with all, `at_once`.

    Weights are the dense model's: a repair, which follows the layers before, is left out. A layer
    of which FFN and attention are split is split in both.
    """
    dense, seq_len = load_dense(run.origin().source, run.asked.load), run.tokens.shape[1]
    rows_BT = run.tokens[: max(1, TOKENS // seq_len)]
    batches = torch.split(rows_BT, max(1, FORWARD_TOKENS // seq_len))
    nats = stock_nats(dense.model)
    maskings = maskings_of(dense, run.layout)

    def loss(*layers: int) -> float:
        with masked(dense, maskings, layers):
            return float(torch.cat([nats(batch) for batch in batches]).mean())

    reference, alone = loss(), []
    with run.progress.bar("one layer split") as update:
        for layer in run.layers:
            alone.append(loss(layer) - reference)
            update(len(alone), len(run.layers))
    at_once = loss(*run.layers) - reference
    return {"layers": list(run.layers), "alone_L": alone, "at_once": at_once, "dense": reference}


def says(values: dict[str, Any]) -> list[str]:
    """Which layers cost most, beside all at once; and whether the first may better stay dense."""
    costs = sorted(zip(values["alone_L"], values["layers"], strict=True), reverse=True)
    most = ", ".join(f"{cost:.3f} (layer {layer})" for cost, layer in costs[:3])
    found = (
        f"nats a token above dense with one layer split and nothing repaired, the most: {most}; "
        f"the median layer {costs[len(costs) // 2][0]:.3f}; all layers at once "
        f"{values['at_once']:.3f}"
    )
    first = values["layers"][0]
    if costs[0][1] == first and costs[0][0] * len(costs) > 4 * values["at_once"]:
        found += f": convert with --first-dense-layers {first + 1} and compare"
    return [found]
