"""Which two models are meant, and whether they can be compared."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from dotmoe.bench.runners import llama_library
from dotmoe.bench.work import num_experts
from dotmoe.errors import UserError, one_line
from dotmoe.evaluate.models import model_folder
from dotmoe.export import require_intact

LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model that has been found, not loaded."""

    name: str
    """As it was called."""
    path: Path
    """Checkpoint folder, or GGUF file."""
    sizes: dict[str, int]
    """Vocabulary, number of layers and model width."""
    context: int
    """Longest context that it claims, in tokens."""
    num_experts: int


def sources(dense: str, moe: str) -> tuple[str, Source, Source]:
    """The runtime, and a dense model and an MoE of the same kind and sizes.

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
    find = _gguf if in_gguf[0] else _checkpoint
    found = find(dense), find(moe)
    for source, wanted in zip(found, (False, True), strict=True):
        if bool(source.num_experts) != wanted:
            has = f"{source.num_experts} experts a layer" if source.num_experts else "no experts"
            raise UserError(f"{source.name} has {has}. Give the dense model first, then the MoE.")
    for what, size in found[0].sizes.items():
        if size != found[1].sizes[what]:
            raise UserError(
                f"the {what} of {dense} is {size:,} and of {moe} {found[1].sizes[what]:,}, but an "
                "MoE has that of its dense model. Give a model and what was made of it."
            )
    return LLAMA_CPP if in_gguf[0] else "transformers", *found


def _gguf(name: str) -> Source:
    from dotmoe.export.gguf_file import GgufFile  # an extra

    path = Path(name).expanduser()
    file = GgufFile(path)
    require_intact(path.parent)
    return Source(
        name=name,
        path=path.resolve(),
        sizes={
            "number of layers": file.size("block_count"),
            "model width": file.size("embedding_length"),
            "vocabulary": file.shape("token_embd.weight")[0],
        },
        context=file.size("context_length"),
        num_experts=file.size("expert_count", 0),
    )


def _checkpoint(name: str) -> Source:
    folder = model_folder(name)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise UserError(f"the config in {folder} cannot be read ({one_line(error)}).") from error
    return Source(
        name=name,
        path=folder,
        sizes={
            "vocabulary": config.vocab_size,
            "number of layers": config.num_hidden_layers,
            "model width": config.hidden_size,
        },
        context=config.max_position_embeddings,
        num_experts=num_experts(config),
    )
