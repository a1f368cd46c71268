"""STAGE evaluate: what a model is worth, measured, with the protocol beside each number."""

from dotmoe.evaluate.active_experts_curve import ladder, perplexity_by_active_experts
from dotmoe.evaluate.checkpoint import evaluate_checkpoint, evaluate_pair
from dotmoe.evaluate.perplexity import EvaluateConfig, PerplexityResult

__all__ = [
    "EvaluateConfig",
    "PerplexityResult",
    "evaluate_checkpoint",
    "evaluate_pair",
    "ladder",
    "perplexity_by_active_experts",
]
