"""Sources with their shares, and mixes that have a name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dotmoe.errors import UserError


@dataclass(frozen=True, slots=True)
class Source:
    """One text of a mix."""

    name: str
    """A file, a folder, or a name for the `datasets` library."""
    weight: float
    """Share of the tokens that are to come from it; the weights of a mix sum to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedMix:
    """A published data set whose parts are mixed in published proportions."""

    dataset: str
    """Its name for the `datasets` library."""
    percent_of_part: dict[str, float]
    """Percent of the tokens, by configuration of the data set."""


MIXES = {
    # Quoted from the OLMo 2 report (2 OLMo 2 Furious), its 50B-token mix; not measured by us. The
    # DOT-MoE paper samples "from the larger Dolmino-mix" and gives no proportions of its own.
    "dolmino": NamedMix(
        dataset="allenai/dolmino-mix-1124",
        percent_of_part={
            "dclm": 47.2,
            "flan": 16.6,
            "pes2o": 5.85,
            "wiki": 7.11,
            "stackexchange": 2.45,
            "math": 20.8,
        },
    )
}
"""By the name that `data` takes; `NAME:FOLDER` is a copy on this machine, a folder a part."""


def expanded(names: Sequence[str], weights: Sequence[float]) -> tuple[Source, ...] | None:
    """Sources of a weighted mix, named mixes taken apart; None where nothing is mixed.

    Args:
        names: Sources as the user gave them.
        weights: One for each, above 0, of any sum; none where the sources are read in order.

    Raises:
        UserError: Another number of weights than of sources, or a named mix among sources without
            weights.
    """
    named = [name for name in names if mix_named(name)]
    if not weights:
        if not named:
            return None
        if len(names) > 1:
            raise UserError(
                f"{named[0]} is a mix itself. Give data_weights to mix it with other sources, "
                "or give it alone."
            )
        weights = (1.0,)
    if len(weights) != len(names):
        raise UserError(
            f"data_weights has {len(weights)} numbers for {len(names)} sources. Give one for each."
        )
    whole = sum(weights)
    return tuple(
        Source(part.name, part.weight * weight / whole)
        for name, weight in zip(names, weights, strict=True)
        for part in _parts(name)
    )


def mix_named(name: str) -> NamedMix | None:
    """The named mix that a source means; a file or folder of that very name comes first."""
    return None if Path(name).exists() else MIXES.get(name.partition(":")[0])


def _parts(name: str) -> list[Source]:
    mix = mix_named(name)
    if mix is None:
        return [Source(name, 1.0)]
    whole = sum(mix.percent_of_part.values())
    place = name.partition(":")[2]
    return [
        Source(str(_folder(place, part)) if place else f"{mix.dataset}:{part}", percent / whole)
        for part, percent in mix.percent_of_part.items()
    ]


def _folder(place: str, part: str) -> Path:
    """Folder of a part in a local copy: there, or in `data` as the hub has it.

    Raises:
        UserError: There is none.
    """
    root = Path(place).expanduser()
    for folder in (root / part, root / "data" / part):
        if folder.is_dir():
            return folder
    raise UserError(f"{root} has no folder {part} (nor data/{part}). Name a copy of the whole mix.")
