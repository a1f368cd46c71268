"""OLMo-2: RMSNorms after attention and FFN, and over all query and all key heads at once."""

from dataclasses import replace
from typing import Any

from dotmoe.models.llama import Llama
from dotmoe.models.traits import DecoderTraits


class Olmo2(Llama):
    """OLMo-2."""

    model_type = "olmo2"

    def traits(self, config: Any) -> DecoderTraits:
        """See `Family.traits`."""
        return replace(super().traits(config), qk_norm="full", norms_after=True)
