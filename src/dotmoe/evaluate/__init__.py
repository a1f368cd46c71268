"""STAGE evaluate: what a model is worth, measured, with the protocol beside each number."""

from dotmoe.evaluate.active_experts_curve import ladder, perplexity_by_active_experts
from dotmoe.evaluate.checkpoint import evaluate_all, evaluate_checkpoint, evaluate_pair, stock_model
from dotmoe.evaluate.fidelity import Closeness, FidelityResult, fidelity
from dotmoe.evaluate.generation import Continuations, GenerateConfig, continuations
from dotmoe.evaluate.perplexity import EvaluateConfig, PerplexityResult
from dotmoe.evaluate.repetition import Repetition, repetition
from dotmoe.evaluate.rolling import RollingResult, rolling_perplexity

__all__ = [
    "Closeness",
    "Continuations",
    "EvaluateConfig",
    "FidelityResult",
    "GenerateConfig",
    "PerplexityResult",
    "Repetition",
    "RollingResult",
    "continuations",
    "evaluate_all",
    "evaluate_checkpoint",
    "evaluate_pair",
    "fidelity",
    "ladder",
    "perplexity_by_active_experts",
    "repetition",
    "rolling_perplexity",
    "stock_model",
]
