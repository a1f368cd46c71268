"""The weights of a GGUF file, grouped by when llama.cpp uses them; from the file's header."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dotmoe.bench.weights import NOTHING, ModelWeights, WeightGroup
from dotmoe.errors import UserError

_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """What a benchmark must know of a file before it is loaded."""

    vocabulary: int
    width: int
    """Model width (D)."""
    context: int
    """Longest context that the file claims, in tokens."""
    kind: str
    """Number format of most weights, such as `Q8_0`."""
    weights: ModelWeights


def gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file; no weight is read.

    Raises:
        UserError: `gguf` is not installed, or the file is not there or no decoder in GGUF.
    """
    # Imported here: the package is not needed to compare checkpoints, and refuses to be imported
    # where `gguf` is not installed.
    from dotmoe.gguf_export.gguf_file import GgufFile

    reader = GgufFile(path).reader
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return _header(fields, reader.tensors)
    except KeyError as error:
        raise UserError(
            f"{path} is no decoder: it lacks {error.args[0]}. Name the GGUF file of a model."
        ) from error


def _header(fields: dict[str, Any], tensors: list[Any]) -> GgufHeader:
    arch = fields["general.architecture"]
    experts = int(fields.get(f"{arch}.expert_count", 0))
    active = int(fields.get(f"{arch}.expert_used_count", 0)) if experts else 0
    layers = int(fields[f"{arch}.block_count"])
    width, heads = (
        int(fields[f"{arch}.embedding_length"]),
        int(fields[f"{arch}.attention.head_count"]),
    )
    by_name = {tensor.name: tensor for tensor in tensors}
    embedding = by_name["token_embd.weight"]
    head = by_name.get("output.weight", embedding)
    fixed, expert, late = NOTHING, NOTHING, 0
    for tensor in tensors:
        if tensor is embedding or tensor is head:
            continue
        place = _IN_BLOCK.match(tensor.name)
        routed = place is not None and place[2].endswith("_exps")
        group = _group(tensor, share=experts if routed else 1)
        fixed, expert = (fixed, expert + group) if routed else (fixed + group, expert)
        if place and int(place[1]) == layers - 1 and place[2].startswith("ffn_"):
            late += group.products * (active if routed else 1)
    vocabulary = int(embedding.shape[1])
    kinds: dict[str, int] = {}
    for tensor in tensors:
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    return GgufHeader(
        vocabulary=vocabulary,
        width=width,
        context=int(fields[f"{arch}.context_length"]),
        kind=max(kinds, key=lambda kind: kinds[kind]),
        weights=ModelWeights(
            embedding_row_bytes=int(embedding.n_bytes) // vocabulary,
            head=_group(head),
            fixed=fixed,
            expert=expert,
            num_experts=experts,
            active_experts=active,
            late_products=late,
            layers=layers,
            heads=heads,
            head_dim=int(fields.get(f"{arch}.attention.key_length", width // heads)),
        ),
    )


def _group(tensor: Any, *, share: int = 1) -> WeightGroup:
    """Bytes and products of a tensor, or of one expert's share of it."""
    is_matrix = sum(int(size) > 1 for size in tensor.shape) >= (3 if share > 1 else 2)
    return WeightGroup(
        num_bytes=int(tensor.n_bytes) // share,
        products=int(tensor.n_elements) // share if is_matrix else 0,
    )
