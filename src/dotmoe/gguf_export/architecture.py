"""The contract of a GGUF architecture: how a layout becomes the tensors that llama.cpp reads."""

from collections.abc import Iterator
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.export.format import Conversion
from dotmoe.gguf_export.decoder import DecoderForm, Metadata
from dotmoe.gguf_export.tensor_plan import GgufTensor
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout


class GgufArchitecture(Protocol):
    """A llama.cpp architecture to export a MoE to. Members are listed in `GGUF_OUTPUTS`."""

    name: str
    """What the format is called."""
    form: DecoderForm
    """The architecture outside its experts."""
    num_moe_tensors: int
    """Tensors of a split FFN, with its router."""
    exponent: int | None
    """p of every layer's router; None: chosen by layer from the router's logits."""

    def refusal(self, dense: DenseModel, granularity: Granularity) -> str | None:
        """Why llama.cpp could not run it exactly (one sentence with the remedy), or None."""
        ...

    def notes(self, layout: ExpertLayout) -> list[str]:
        """What a user of the file must know of the architecture, one sentence each."""
        ...

    def metadata(self, conversion: Conversion) -> Metadata:
        """Keys that describe the experts; without the architecture's prefix."""
        ...

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[GgufTensor]:
        """Router and experts of a split layer."""
        ...

    def active_experts_values(self, layout: ExpertLayout) -> tuple[Metadata, dict[str, float]]:
        """All that states k: metadata keys, and tensors that hold one value throughout."""
        ...

    def weights(
        self, scaled_TE: Float[Tensor, "T E"], active_experts: int
    ) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]]:
        """llama.cpp's router in float32: chosen experts, and what their outputs are multiplied by.

        Args:
            scaled_TE: Logits of the router as written, 2^-p l.
            active_experts: k.
        """
        ...
