"""What a GGUF export leaves on record, beside the file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dotmoe.export.record import RECORD_FILE
from dotmoe.gguf_export.router_check import RouterCheck
from dotmoe.gguf_export.run_check import RunCheck


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVerification:
    """What was compared after writing."""

    tensors: int
    """Tensors read back, each value compared with the dense checkpoint's or the layout's."""
    storing_error: float
    """Largest root mean square error of a tensor, in root mean squares of the tensor; 0 for f32."""
    run: RunCheck | None
    """The file run in llama.cpp; None where llama-cpp-python is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufRecord:
    """Content of `dotmoe.json`."""

    name: str
    """Name of the exported folder."""
    format: str
    """`gguf_llama`, `gguf_glm4moe` or `gguf_dense`."""
    arch: str
    """Architecture that llama.cpp runs it as."""
    source: str
    """Dense model: hub name or folder."""
    revision: str | None
    """Commit of a hub model."""
    dotmoe_version: str
    type: str
    """Number format of the matrices."""
    tensor_types: dict[str, int]
    """Tensors by the number format they are stored in."""
    fallbacks: list[str]
    """Matrices stored as F16 because their rows are no multiple of the format's block."""
    num_layers: int
    num_experts: int | None
    """Experts a layer (E); None for a dense file, as are the next four."""
    expert_size: int | None
    """Neurons of one expert (s)."""
    active_experts: int | None
    """Experts run per token (k)."""
    shared_size: int | None
    """Neurons that are always on, in each split layer."""
    first_dense_layers: int | None
    """Leading layers that are not split."""
    parameters: dict[str, int]
    """Exact counts: dense, stored, active, active with routers, active without embeddings."""
    files: list[str]
    """The GGUF file."""
    total_bytes: int
    """Bytes of all tensors, with the architecture's own extras."""
    tokenizer: str
    """`tokenizer.ggml.model`, and after a slash `tokenizer.ggml.pre`."""
    context: int
    """Longest text that is computed as the dense model does, in tokens."""
    routers: list[RouterCheck]
    """The routers as llama.cpp runs them."""
    verification: GgufVerification
    notes: list[str]
    """What a user of the model must know."""

    @classmethod
    def load(cls, folder: Path) -> "GgufRecord":
        """The record of an exported folder."""
        values = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        verification = values.pop("verification")
        run = verification.pop("run")
        return cls(
            **{**values, "routers": [RouterCheck(**router) for router in values["routers"]]},
            verification=GgufVerification(
                **verification, run=None if run is None else RunCheck(**run)
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(self.as_dict(), indent=2) + "\n"
