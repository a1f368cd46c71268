"""How an architecture turns router logits into the weights of the chosen experts."""

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """Weights of the experts of a token, and the constant that the export sets against them.

    `constant` times the weight of a chosen expert is 1 but for the logits times 2^-p. It is a field
    of the config, or folded into the down projections.
    """

    score: Score
    """Softmax or sigmoid over all experts before the k are chosen, or softmax over the chosen."""
    renormalised: bool
    """Weights are divided by their sum over the chosen."""
    constant: float
    """1, 2, k or E; see above."""
    cast_to_model_dtype: bool = False
    """Some runtime rounds the weights to the dtype of the model."""
    logits_in_model_dtype: bool = False
    """Some runtime computes the logits in the dtype of the model, where many of them tie."""
