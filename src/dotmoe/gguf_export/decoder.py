"""Everything of a GGUF outside its experts: metadata and tensors of a decoder in LLaMA's form."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint.tensors import EMBEDDING, HEAD, NORM, Tensors
from dotmoe.export.format import exported_context
from dotmoe.export.tensors import carried_names
from dotmoe.gguf_export.rope import (
    FACTORS,
    frequency_factors,
    pairwise_order,
    rope_refusal,
    scaling_metadata,
)
from dotmoe.gguf_export.tensor_plan import GgufTensor, carried, whole
from dotmoe.models.traits import Multipliers

Metadata = dict[str, Any]

OUTER = {EMBEDDING: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}
"""GGUF names of the tensors outside the layers."""

_IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    **{f"self_attn.{p}_proj.weight": f"attn_{p}.weight" for p in "qkv"},
    **{f"self_attn.{p}_proj.bias": f"attn_{p}.bias" for p in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderForm:
    """What llama.cpp's architectures differ in outside the FFN."""

    arch: str
    """`general.architecture`."""
    rotates_pairs: bool
    """Rotates neighbouring entries of a head, and reads frequency factors; else halves, and none.
    """
    qk_norm: tuple[str, ...]
    """Kinds of query and key norm that it has."""
    output_bias: bool
    """Takes a bias on the attention's output projection."""
    ffn_norm: str = "ffn_norm"
    """Name of the norm before the FFN."""

    def layer_name(self, suffix: str) -> str:
        """GGUF name, within a layer, of a dense tensor named `model.layers.N.` and `suffix`."""
        if suffix == "post_attention_layernorm.weight":
            return f"{self.ffn_norm}.weight"
        return _IN_LAYER[suffix]


def decoder_refusal(dense: DenseModel, form: DecoderForm, name: str) -> str | None:
    """Why llama.cpp would compute something else outside the FFN (one sentence), or None."""
    traits = dense.family.traits(dense.config)
    kind = "no query and key norms" if traits.qk_norm == "none" else f"{traits.qk_norm} QK-norm"
    complaints = {
        f"has {kind}": traits.qk_norm not in form.qk_norm,
        "has its norms after attention and FFN": traits.norms_after,
        "has a bias on the attention's output projection": (
            traits.output_bias and not form.output_bias
        ),
        "multiplies embeddings, residuals, scores or logits by constants": (
            traits.multipliers != Multipliers()
        ),
    }
    for complaint, applies in complaints.items():
        if applies:
            return (
                f"{dense.source} {complaint}, which {name} cannot hold: llama.cpp's architecture "
                f"{form.arch} computes without. Choose another --format."
            )
    return rope_refusal(dense, name, reads_factors=form.rotates_pairs)


def decoder_metadata(dense: DenseModel, form: DecoderForm) -> Metadata:
    """Sizes, norm and rotary keys; without the architecture's prefix."""
    config = dense.config
    head_dim = dense.family.traits(config).head_dim
    scaling = {} if form.rotates_pairs else scaling_metadata(dense)
    if form.rotates_pairs:
        _, attention = frequency_factors(dense)
        scaling = {} if attention == 1.0 else {"scaling.attn_factor": attention}
    return {
        "vocab_size": int(config.vocab_size),
        "context_length": exported_context(dense),
        "embedding_length": int(config.hidden_size),
        "block_count": int(config.num_hidden_layers),
        "attention.head_count": int(config.num_attention_heads),
        "attention.head_count_kv": int(config.num_key_value_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **{f"rope.{key}": value for key, value in scaling.items()},
    }


def outer_tensors(dense: DenseModel, tensors: Tensors, form: DecoderForm) -> list[GgufTensor]:
    """Embedding, final norm, head, and frequency factors where the model has them.

    A tied head is left out: llama.cpp then takes the embedding, and stores the matrix once.
    """
    made = [
        carried(tensors, EMBEDDING, OUTER[EMBEDDING], "embedding"),
        carried(tensors, NORM, OUTER[NORM], "exact"),
    ]
    if not dense.config.tie_word_embeddings:
        made.append(carried(tensors, HEAD, OUTER[HEAD], "embedding"))
    if form.rotates_pairs:
        factors, _ = frequency_factors(dense)
        if factors is not None:
            made.append(whole(FACTORS, factors))
    return made


def layer_tensors(
    dense: DenseModel, tensors: Tensors, form: DecoderForm, layer: int
) -> Iterator[GgufTensor]:
    """Norms and attention of one layer."""
    for source in carried_names(dense, layer):
        suffix = source.removeprefix(f"model.layers.{layer}.")
        name = form.layer_name(suffix)
        is_matrix = name.endswith(".weight") and "norm" not in name
        order = None
        if form.rotates_pairs and name.startswith(("attn_q.", "attn_k.")):
            order = pairwise_order(
                rotated_heads(dense, name), dense.family.traits(dense.config).head_dim
            )
        yield carried(
            tensors, source, f"blk.{layer}.{name}", "matrix" if is_matrix else "exact", order
        )


def rotated_heads(dense: DenseModel, name: str) -> int:
    """Heads of the query or key projection that a GGUF name means."""
    is_query = name.startswith("attn_q.")
    config = dense.config
    return int(config.num_attention_heads if is_query else config.num_key_value_heads)
