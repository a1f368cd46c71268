"""Names of the published methods, and their options."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from dotmoe.common.options import at_least

BASELINES = (
    "random_split",
    "contiguous_split",
    "static_pruning",
    "weight_clusters",
    "co_activation",
    "lte",
    "llama_moe_v2",
    "llama_moe_v2_residual",
    "cmoe",
)
"""Methods that split FFNs, in the order of tables; `dotmoe.rivals.baselines` implements them."""
PRUNERS = (
    "magnitude_2_4",
    "wanda_2_4",
    "sparsegpt_2_4",
    "pruner_zero_2_4",
    "slicegpt",
    "llm_pruner",
    "modegpt",
    "disp_llm",
    "k_obd",
    "llm_surgeon",
    "shortgpt",
    "sleb",
)
"""Methods that prune, in the order of tables; `dotmoe.rivals.pruning` implements them."""

if TYPE_CHECKING:
    MethodName = str
    PruningName = str
    ComparedName = str
else:
    MethodName = Literal[("dot_moe", *BASELINES)]
    PruningName = Literal[PRUNERS]
    ComparedName = Literal[("dot_moe", *BASELINES, *PRUNERS, "all")]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConfig:
    """Options of the methods other than DOT-MoE, besides calibration_tokens and ridge."""

    split_router: Literal["own", "ridge"] = "own"
    """`own`: the router of the method itself (for cmoe a linear fit to it, as no stock architecture
    holds it). `ridge`: the router that dot_moe starts from, fitted to the method's experts."""
    router_steps: Annotated[int, at_least(0)] = 0
    """Alignment steps that train a baseline's router while its experts stay fixed; 0: none."""
    lte_steps: Annotated[int, at_least(1)] = 100
    """Number of steps that train LTE's gates, of 1,024 calibration tokens or one sequence each; for
    lte only."""
