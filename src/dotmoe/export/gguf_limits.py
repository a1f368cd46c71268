"""What the GGUF formats hold and llama.cpp runs; it needs no package for GGUF files."""

from dotmoe.export.architectures import FORMATS
from dotmoe.export.format import BIASES, Feature, features_of_decoder, features_of_split
from dotmoe.method.granularity import Granularity, Splits
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hf_config import rope_of

GLM4MOE, LLAMA = "gguf_glm4moe", "gguf_llama"
_GLM4MOE_FEATURES = tuple(
    feature for feature in FORMATS["glm4_moe"].supports if feature != Feature.PARTLY_ROTATED
)
SUPPORTS = {GLM4MOE: _GLM4MOE_FEATURES, LLAMA: (*BIASES, Feature.OWN_HEAD_DIM)}
"""Features that a format can represent, by its name."""
MOE_TENSORS = {GLM4MOE: 8, LLAMA: 5}
"""Number of tensors of a split FFN, including its router, by the name of a format."""
PLAIN_ROPE = ("default", "linear")
"""Types of rotary embeddings without frequency factors, which architecture `llama` alone reads."""
ROPE_TYPES = (*PLAIN_ROPE, "llama3", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the text."""


def most_active_experts(dense: DenseModel, split: Granularity, moe_tensors: int) -> int:
    """Largest k with which llama.cpp runs a file; with more it aborts (`GGML_ASSERT(obj_new)`).

    Its graph has room for 8 nodes per tensor of the file, at least 1,024. A layer takes 52 to
    56 nodes, and the sum over a token's k experts takes 2 k - 1 more (llama-cpp-python 0.3.36).
    """
    traits, num_layers = dense.traits, dense.widths.layers
    attention = 6  # four projections and two norms
    if traits.qkv_bias:
        attention += 3
    if traits.output_bias:
        attention += 1
    if traits.qk_norm != "none":
        attention += 2
    moe_layers = num_layers - split.first_dense_layers
    if moe_layers < 1:
        return 0
    ffns = 3 * split.first_dense_layers + moe_tensors * moe_layers
    tensors = 2 + num_layers * attention + ffns
    room = max(1024, 8 * tensors) - 16 - 56 * num_layers
    return max(0, (room // moe_layers + 1) // 2)


def room_in_llama_cpp(dense: DenseModel, splits: Splits) -> int:
    """Largest k with which llama.cpp runs a GGUF of these splits; 0 if no format holds them."""
    names = [name for name in (GLM4MOE, LLAMA) if _is_held(dense, splits, name)]
    rooms = [most_active_experts(dense, splits[0], MOE_TENSORS[name]) for name in names]
    return max(rooms, default=0)


def _is_held(dense: DenseModel, splits: Splits, name: str) -> bool:
    """Whether a format holds a model with these splits, whatever their k."""
    features = features_of_decoder(dense) | features_of_split(splits)
    ropes = ROPE_TYPES if name == LLAMA else PLAIN_ROPE
    return (
        not dense.traits.has_own_decoder
        and features <= {*SUPPORTS[name]}
        and rope_of(dense.config)["rope_type"] in ropes
    )
