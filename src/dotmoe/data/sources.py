"""From the names a user gives to weighted sources, and to streams of documents."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

from dotmoe.data.files import FORMATS, file_documents, text_of_row
from dotmoe.errors import UserError, nearest, one_line
from dotmoe.options import above, at_least
from dotmoe.stdlib_text import stdlib_documents

SELF = "self"
"""Source name of text sampled from the dense model, which only a conversion can make."""

STDLIB = "python-stdlib"
STDLIB_HELDOUT = "python-stdlib-heldout"

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


class NamedMix(NamedTuple):
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Text to train or calibrate on."""

    data: tuple[str, ...] = ()
    """Sources, read in this order: .txt (one document a file), .jsonl or .parquet files (one
    document a row), the first two also as .gz; `python-stdlib` (the source files of this Python's
    own library) or `python-stdlib-heldout` (the sixteenth of them kept apart); names for the
    `datasets` library, streamed (`allenai/c4:en`: after the colon the configuration); `dolmino`
    (the paper's mix, from the hub; `dolmino:FOLDER`: a copy on this machine); or `self`: text that
    the dense model itself samples. `SOURCE@SPLIT#FIELD` gives one source a split and a text field
    of its own."""
    data_weights: tuple[Annotated[float, above(0)], ...] = ()
    """Mix the sources: the share of each in the tokens, one number a source, of any sum. Default:
    one source after the other."""
    data_epochs: Annotated[int, at_least(1)] = 1
    """How often a source of a mix may be read. After that it has run out, and the others go on in
    their proportions."""
    shuffle_buffer: Annotated[int | None, at_least(0)] = None
    """Documents of a source that are held back and drawn from at random; 0: its own order. With
    `datasets` also the order of the files that make up the source. Default: 10000 for `dolmino`,
    else 0."""
    data_seed: Annotated[int, at_least(0)] = 0
    """Of the shuffle buffer, and of text sampled from the dense model."""
    text_field: str | None = None
    """Field of a row that holds the text. Default: the first of text, content, page, passage,
    document that the rows have."""
    split: str = "train"
    """Split of a `datasets` source; files have none."""
    seq_len: Annotated[int, at_least(2)] = 2048
    """Tokens of a block, 2 or more. Paper: 2048. Lowered to the model's context if that is less."""

    @property
    def named_mixes(self) -> list[str]:
        """Sources that are a mix themselves; a file or folder of that very name is none."""
        return [name for name in self.data if _mix_named(name)]

    @property
    def is_mix(self) -> bool:
        """Whether sources are read side by side, by their weights."""
        return bool(self.data_weights or self.named_mixes)

    def check_together(self) -> None:
        """Refuse to repeat sources that are not mixed."""
        if self.data and self.data_epochs > 1 and not self.is_mix:
            raise UserError(
                f"data_epochs is {self.data_epochs}, but only the sources of a mix are repeated. "
                "Give data_weights, or leave data_epochs out."
            )


def documents(config: DataConfig) -> Iterator[str]:
    """Stream the documents of all sources, one source after the other.

    A long .txt file comes in pieces: the first is a plain string, those after it are
    `Continuation`, so that packing knows where a document starts and memory stays bounded.

    Returns:
        An iterator; every named file is known to exist before the first document is asked for.

    Raises:
        UserError: No source named, or one that is missing, empty, damaged or not text; raised
            where reading finds it, with file and line. Weights or a named mix, which only
            `pack_sources` can mix.
    """
    if config.is_mix:
        raise UserError(
            f"{', '.join(config.data)} is a mix, which is for training. Name files or a data set."
        )
    streams = [opened(name, config) for name, _ in sources_of(config)]
    return (document for stream in streams for document in stream)


def sources_of(config: DataConfig) -> list[tuple[str, float | None]]:
    """Every source with its share of the tokens, named mixes taken apart; None: read in order.

    Raises:
        UserError: No source, weights that do not fit them, a named mix among sources without
            weights, or a source that is not there.
    """
    names, weights = config.data, config.data_weights
    if not names:
        raise UserError(
            f"data names no source. Give {', '.join(FORMATS)} files, a datasets name or {STDLIB}."
        )
    if SELF in names:
        raise UserError(
            f"{SELF} is text to train on, sampled from the dense model, and cannot be mixed or "
            f"measured on. Give it to convert alone, or name a text. (A folder: ./{SELF})"
        )
    if config.named_mixes and not weights:
        if len(names) > 1:
            raise UserError(
                f"{config.named_mixes[0]} is a mix itself. Give data_weights to mix it with other "
                "sources, or give it alone."
            )
        weights = (1.0,)
    if weights and len(weights) != len(names):
        raise UserError(
            f"data_weights has {len(weights)} numbers for {len(names)} sources. Give one for each."
        )
    sources: list[tuple[str, float | None]] = [(name, None) for name in names]
    if weights:
        sources = [
            (part, share * weight / sum(weights))
            for name, weight in zip(names, weights, strict=True)
            for part, share in _parts_of(name)
        ]
    for name, _ in sources:
        opened(name, config)
    return sources


def opened(source: str, config: DataConfig, epoch: int = 0) -> Iterator[str]:
    """Stream the documents of one source.

    Args:
        source: Its name, with a split and a field of its own if need be.
        config: Split and field where the name has none, and how to shuffle.
        epoch: Shuffled sources have another order in each.

    Raises:
        UserError: No such source.
    """
    name, own = _with_own_options(source, config)
    size = config.shuffle_buffer
    if size is None:  # the files of a named mix are sorted by origin
        size = 10_000 if config.named_mixes else 0
    digest = sha256(f"{config.data_seed}/{epoch}/{source}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    if name in (STDLIB, STDLIB_HELDOUT):
        stream = stdlib_documents("train" if name == STDLIB else "heldout")
        return shuffled(stream, size, seed)
    path = Path(name).expanduser()
    if path.is_file():
        return shuffled(_never_empty(path, file_documents(path, own.text_field)), size, seed)
    named_as_file = name.removesuffix(".gz").endswith(FORMATS) or name.endswith(".gz")
    if not path.is_dir() and (named_as_file or not _HUB_NAME.fullmatch(name)):
        raise UserError(f"{name} does not exist.{_nearest(path)} Name an existing file.")
    return _dataset_documents(name, own, size, seed)


def shuffled(stream: Iterable[str], size: int, seed: int) -> Iterator[str]:
    """Documents in another order: each is drawn from `size` that are held back.

    A document that comes in pieces is shuffled as so many documents. The same arguments give the
    same order; a `size` of 0 leaves the stream as it is.
    """
    if size == 0:
        yield from stream
        return
    generator = Random(seed)
    held: list[str] = []
    for document in stream:
        if len(held) < size:
            held.append(str(document))
        elif document:
            place = generator.randrange(size)
            yield held[place]
            held[place] = str(document)
    generator.shuffle(held)
    yield from held


def _with_own_options(source: str, config: DataConfig) -> tuple[str, DataConfig]:
    """A source's bare name, and the config with its own split and field."""
    if Path(source).expanduser().exists():
        return source, config
    rest, _, field = source.partition("#")
    name, _, split = (rest, "", "") if Path(rest).expanduser().exists() else rest.partition("@")
    own = replace(config, split=split or config.split, text_field=field or config.text_field)
    return name, own


def _nearest(path: Path) -> str:
    beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    return nearest(str(path), [str(path.parent / name) for name in beside])


def _never_empty(path: Path, stream: Iterator[str]) -> Iterator[str]:
    empty = True
    for document in stream:
        empty = empty and not document.strip()
        yield document
    if empty:
        raise UserError(f"{path} is empty: it holds no text. Name a file with text in it.")


def _dataset_documents(source: str, config: DataConfig, buffer: int, seed: int) -> Iterator[str]:
    # Importing datasets takes seconds, and local files do not need it.
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    is_folder = Path(source).expanduser().is_dir()
    name, _, part = (source, "", "") if is_folder else source.partition(":")
    try:
        rows = load_dataset(name, part or None, split=config.split, streaming=True)
        if buffer:
            rows = rows.shuffle(seed=seed, buffer_size=buffer)
        for number, row in enumerate(rows, start=1):
            yield text_of_row(dict(row), config.text_field, f"row {number} of {source}")
    except UserError:
        raise
    except (OSError, ValueError, DatasetGenerationError) as error:
        near = "" if is_folder else _nearest(Path(source))
        cause = one_line(error)[:200].rstrip(".") or type(error).__name__
        package = " Files of .zst need: pip install zstandard." if "zstd" in cause.lower() else ""
        raise UserError(
            f"{source} ({config.split}) cannot be read by datasets: {cause}. "
            f"Check the name, the split and the network.{near}{package}"
        ) from error


def _mix_named(name: str) -> NamedMix | None:
    return None if Path(name).exists() else MIXES.get(name.partition(":")[0])


def _parts_of(name: str) -> list[tuple[str, float]]:
    """Sources that a name stands for, with shares that sum to 1."""
    mix = _mix_named(name)
    if mix is None:
        return [(name, 1.0)]
    place, whole = name.partition(":")[2], sum(mix.percent_of_part.values())
    return [
        (_folder(place, part) if place else f"{mix.dataset}:{part}", percent / whole)
        for part, percent in mix.percent_of_part.items()
    ]


def _folder(place: str, part: str) -> str:
    """Folder of a part in a local copy: there, or in `data` as the hub has it."""
    root = Path(place).expanduser()
    for folder in (root / part, root / "data" / part):
        if folder.is_dir():
            return str(folder)
    raise UserError(f"{root} has no folder {part} (nor data/{part}). Name a copy of the whole mix.")
