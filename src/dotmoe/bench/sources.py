"""Which two models are meant, and whether they can be compared."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from dotmoe.bench.gguf_weights import gguf_header
from dotmoe.bench.llama_runner import llama_library
from dotmoe.bench.points import Runtime
from dotmoe.bench.transformers_weights import num_experts
from dotmoe.checkpoint_folder import checkpoint_folder, one_line, require_checkpoint
from dotmoe.errors import UserError
from dotmoe.export import require_intact
from dotmoe.run_folder import export_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model that has been found, not loaded."""

    name: str
    """As it was called."""
    path: Path
    """Checkpoint folder, or GGUF file."""
    vocabulary: int
    layers: int
    width: int
    context: int
    """Longest context that it claims, in tokens."""
    num_experts: int


def sources(dense: str, moe: str) -> tuple[Runtime, Source, Source]:
    """Find a dense model and an MoE of the same kind and sizes.

    Args:
        dense: Checkpoint folder, run folder, hub name, or GGUF file.
        moe: The same.

    Raises:
        UserError: One is a GGUF file and the other is not, llama.cpp is not installed, a model is
            missing, or the two are not a dense model and an MoE of the same sizes.
    """
    in_gguf = [name.lower().endswith(".gguf") for name in (dense, moe)]
    if in_gguf[0] != in_gguf[1]:
        file, other = (dense, moe) if in_gguf[0] else (moe, dense)
        raise UserError(
            f"{file} is a GGUF file and {other} is not, but both must run in the same software. "
            "Give two GGUF files or two checkpoints."
        )
    if in_gguf[0]:
        llama_library()
        found = _gguf(dense), _gguf(moe)
    else:
        found = _checkpoint(dense), _checkpoint(moe)
    _require_comparable(*found)
    return "llama.cpp" if in_gguf[0] else "transformers", *found


def _gguf(name: str) -> Source:
    path = Path(name).expanduser()
    header = gguf_header(path)
    return Source(
        name=name,
        path=path.resolve(),
        vocabulary=header.vocabulary,
        layers=header.weights.layers,
        width=header.width,
        context=header.context,
        num_experts=header.weights.num_experts,
    )


def _checkpoint(name: str) -> Source:
    local = export_folder(Path(name).expanduser())
    folder = local if local.is_dir() else checkpoint_folder(name)
    require_checkpoint(folder)
    require_intact(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise UserError(f"the config in {folder} cannot be read ({one_line(error)}).") from error
    return Source(
        name=name,
        path=folder,
        vocabulary=config.vocab_size,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        context=config.max_position_embeddings,
        num_experts=num_experts(config),
    )


def _require_comparable(dense: Source, moe: Source) -> None:
    if dense.num_experts or not moe.num_experts:
        wrong = dense if dense.num_experts else moe
        has = f"has {wrong.num_experts} experts a layer" if wrong.num_experts else "has no experts"
        raise UserError(f"{wrong.name} {has}. Give the dense model first, then the MoE.")
    for what, first, second in (
        ("vocabulary", dense.vocabulary, moe.vocabulary),
        ("number of layers", dense.layers, moe.layers),
        ("model width", dense.width, moe.width),
    ):
        if first != second:
            raise UserError(
                f"the {what} of {dense.name} is {first:,} and of {moe.name} {second:,}, but an MoE "
                "has that of its dense model. Give a model and what was made of it."
            )
