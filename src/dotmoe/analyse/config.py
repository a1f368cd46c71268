"""What a user can ask to be analysed of a finished run."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from dotmoe.errors import UserError
from dotmoe.load import LoadConfig

AnalysisName = Literal[
    "expert_utilisation",
    "routing_overlap",
    "expert_outputs_tsne",
    "alignment_history",
    "overhead_profile",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyseConfig:
    """What to analyse of a finished run."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished `dotmoe convert` or `dotmoe finetune`."""
    only: tuple[AnalysisName, ...] = ()
    """Make these analyses. Default: all that the run has something for."""
    tokens: int = 32768
    """Tokens of the held-out text to route, at most; at least one block."""
    layer: int | None = None
    """Layer whose expert outputs are shown, a split one. Default: the one at a third of the depth,
    as the paper's."""
    points: int = 1000
    """Expert outputs that are shown, about."""
    experts_shown: int = 16
    """Experts whose outputs are shown, at most; 2 or more."""
    profile_steps: int = 5
    """Alignment steps that are timed."""
    seed: int = 0
    """Of samples and of t-SNE."""
    load: LoadConfig = field(default_factory=LoadConfig)

    def check(self) -> None:
        """Refuse numbers that no analysis can use.

        Raises:
            UserError: A number out of its range.
        """
        lowest = {"tokens": 1, "points": 10, "experts_shown": 2, "profile_steps": 1, "seed": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise UserError(
                    f"{name} is {getattr(self, name)}, but it must be at least {least}. "
                    "Choose such a number."
                )
