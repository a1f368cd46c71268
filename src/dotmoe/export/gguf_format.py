"""GGUF files for llama.cpp: a MoE as architecture `glm4moe` or `llama`, or the dense model itself.

`glm4moe`: gating function 3 chooses experts by their logits and takes the softmax over the chosen
experts; with scaled router rows each weight is nearly 1/k, which `expert_weights_scale` makes 1.

`llama` weights the chosen experts by the renormalised softmax of their logits, 1/k for a scaled
router, and multiplies each expert's output by its entry of `ffn_down_exps.scale`, which is k. Its
weights are the dense ones for every k, and it reads any static scaling of rotary embeddings.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION, MODEL_ARCH_NAMES, LlamaFileType, get_tensor_name_map
from jaxtyping import Float, Int
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dotmoe.export.config import GGUF_DENSE
from dotmoe.export.format import (
    BLOCKS,
    ConvertedModel,
    Format,
    Gating,
    TensorSpec,
    shared_experts,
)
from dotmoe.export.gguf_file import check_gguf, write_gguf
from dotmoe.export.gguf_limits import (
    GLM4MOE,
    LLAMA,
    MOE_TENSORS,
    PLAIN_ROPE,
    ROPE_TYPES,
    SUPPORTS,
    most_active_experts,
)
from dotmoe.export.gguf_tokenizer import tokenizer_keys, tokenizer_name
from dotmoe.method.granularity import Splits
from dotmoe.models.dense_model import DenseModel

SOFTMAX_OF_CHOSEN = 3
"""`expert_gating_func` for the softmax over the chosen logits; gguf has no name for it."""
MOST_EXPERTS = 1024
"""Limit of llama.cpp in llama-cpp-python 0.3.36, which ends the process if it is exceeded."""


class GgufFormat(Format):
    """Format `gguf_dense`, the dense model itself, and base class of the GGUF formats with experts.

    Architecture `llama` rotates neighbouring entries of a head and reads frequency factors; the
    others rotate halves, as Transformers does, and support linear scaling only.
    """

    name = GGUF_DENSE
    servers = ("llama.cpp",)
    active_experts_key = "expert_used_count"
    writes_tied_head = False  # llama.cpp then uses the embedding
    has_experts = False
    supports = SUPPORTS[GLM4MOE]
    rope_types = ROPE_TYPES
    gating = Gating(score="none")
    check = check_gguf

    def arch(self, dense: DenseModel) -> str:
        """Value of the key `general.architecture`."""
        return "qwen3" if dense.traits.qk_norm == "head" else "llama"

    def unsupported(self, dense: DenseModel, splits: Splits, dtype: torch.dtype) -> str | None:
        if reason := super().unsupported(dense, splits, dtype):
            return reason
        kind = dense.config.rope_parameters["rope_type"]
        if self.arch(dense) != "llama" and kind not in PLAIN_ROPE:
            return (
                f"rope_type is {kind!r}, but llama.cpp reads no frequency factors for {self.name} "
                "and would silently rotate wrongly. Choose --format gguf_llama, which supports "
                "no shared expert and no leading dense layers."
            )
        if not self.has_experts:
            return None
        split = splits[0]
        most = most_active_experts(dense, split, MOE_TENSORS[self.name])
        if not 2 <= split.num_experts <= MOST_EXPERTS:
            return (
                f"The layout has {split.num_experts} experts per layer, but llama.cpp runs 2 to "
                f"{MOST_EXPERTS}. Choose another expert_size."
            )
        if split.active_experts > most:
            return (
                f"{split.active_experts} experts run per token, but llama.cpp's graph has room for "
                f"{most} in such a model, and it aborts with more. Choose --active-experts "
                f"{most} or fewer, or larger experts."
            )
        return None

    def exactness(self, converted: ConvertedModel) -> str:
        return f"expert weights are stored as {converted.config.gguf_type}"

    def details(self, converted: ConvertedModel) -> dict[str, Any]:
        return {
            "arch": self.arch(converted.dense),
            "type": converted.config.gguf_type,
            "tokenizer": tokenizer_name(self._tokenizer(converted)[0]),
            "context": self.context(converted.dense),
        }

    def notes(self, converted: ConvertedModel) -> list[str]:
        return [*self._tokenizer(converted)[1], *super().notes(converted)]

    def _tokenizer(self, converted: ConvertedModel) -> tuple[dict[str, Any], list[str]]:
        return tokenizer_keys(
            converted.dense, converted.config.gguf_tokenizer, converted.origin.name
        )

    def header(self, converted: ConvertedModel) -> dict[str, Any]:
        """All metadata keys except `general.architecture`, with their full names."""
        dense, config = converted.dense, converted.dense.config
        head_dim, rope = dense.traits.head_dim, config.rope_parameters
        scaling: dict[str, Any] = {}
        if self.arch(dense) == "llama":
            _, attention = frequency_factors(config)
            scaling = {} if attention == 1.0 else {"attn_factor": attention}
        elif rope["rope_type"] == "linear":
            scaling = {"type": "linear", "factor": float(rope["factor"])}
        keys = {
            "vocab_size": int(config.vocab_size),
            "context_length": self.context(dense),
            "embedding_length": int(config.hidden_size),
            "block_count": int(config.num_hidden_layers),
            "attention.head_count": int(config.num_attention_heads),
            "attention.head_count_kv": int(config.num_key_value_heads),
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "rope.dimension_count": head_dim,
            "rope.freq_base": float(rope["rope_theta"]),
            **{f"rope.scaling.{key}": value for key, value in scaling.items()},
            **self._ffn_keys(converted),
        }
        stored = converted.config.gguf_type.upper()
        share = "ALL" if stored == "F32" else "MOSTLY"
        file_type = LlamaFileType[f"{share}_{stored}"]
        return {
            "general.type": "model",
            "general.file_type": int(file_type),
            "general.quantization_version": GGML_QUANT_VERSION,
            **{f"{self.arch(dense)}.{key}": value for key, value in keys.items()},
            **self._tokenizer(converted)[0],
        }

    def _ffn_keys(self, converted: ConvertedModel) -> dict[str, Any]:
        return {"feed_forward_length": converted.layout.granularity.units}

    def tensors(self, converted: ConvertedModel) -> Iterator[TensorSpec]:
        yield from super().tensors(converted)
        factors, _ = frequency_factors(converted.dense.config)
        if factors is not None and self.arch(converted.dense) == "llama":
            yield TensorSpec.of("rope_freqs.weight", factors, torch.float32)

    def dense_tensor(self, converted: ConvertedModel, name: str) -> TensorSpec:
        """Spec of a dense tensor; for arch `llama`, queries and keys are in `pairwise_order`."""
        dense, config = converted.dense, converted.dense.config
        arch = self.arch(dense)
        stored_name = _names(arch, dense.widths.layers).get_name(name, (".weight", ".bias"))
        assert stored_name is not None, f"{name} has no place in {arch}"
        rotated = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        heads = rotated.get(name.split(".")[-2], 0)
        rows: slice | Tensor = slice(None)
        if heads and arch == "llama":
            rows = pairwise_order(heads, dense.traits.head_dim)
        spec = converted.spec(name, stored_name, lambda whole: whole[rows])
        return self._stored(converted, spec)

    def _stored(self, converted: ConvertedModel, spec: TensorSpec) -> TensorSpec:
        """The spec with its number format in the file.

        Biases and norms, like routers, stay float32. Embedding and head cause much of a model's
        error but take little of its time, so 4-bit files store them with 8 bits. A tensor whose row
        length is no multiple of the format's block is stored as float16 instead.
        """
        stored = converted.config.gguf_type.upper()
        if stored == "Q4_0" and spec.name in ("token_embd.weight", "output.weight"):
            stored = "Q8_0"
        if spec.shape[-1] % BLOCKS[stored][0]:
            stored = "F16"
        return replace(spec, stored=stored if len(spec.shape) > 1 else "F32")

    def moe_tensors(self, converted: ConvertedModel, layer: int) -> Iterator[TensorSpec]:
        yield replace(converted.router(layer, f"blk.{layer}.ffn_gate_inp.weight"), stored="F32")
        neurons_ES = converted.layout.neurons_of_expert(layer)
        for spec in converted.projections(layer, neurons_ES, f"blk.{layer}.ffn_{{}}_exps.weight"):
            yield self._stored(converted, spec)

    def write(self, converted: ConvertedModel, folder: Path) -> list[str]:
        path = folder / f"model-{converted.config.gguf_type}.gguf"
        arch, specs = self.arch(converted.dense), list(self.tensors(converted))
        write_gguf(path, arch, self.header(converted), specs, converted.on_progress)
        converted.tensors.forget()
        return [path.name]


class GgufGlm4Moe(GgufFormat):
    """Architecture `glm4moe`; its shared expert holds the neurons that are always on."""

    name = GLM4MOE
    has_experts = True
    active_experts_editable = True
    gating = Gating(score="softmax_of_chosen", only_in="llama.cpp")

    def arch(self, dense: DenseModel) -> str:
        return "glm4moe"

    def _ffn_keys(self, converted: ConvertedModel) -> dict[str, Any]:
        split = converted.layout.granularity
        return {
            "feed_forward_length": split.units,
            "expert_feed_forward_length": split.expert_size,
            "expert_count": split.num_experts,
            "expert_shared_count": shared_experts(split),
            "leading_dense_block_count": split.first_dense_layers,
            "expert_gating_func": SOFTMAX_OF_CHOSEN,
            "expert_weights_norm": False,
            "expert_used_count": split.active_experts,
            "expert_weights_scale": float(split.active_experts),
        }

    def moe_tensors(self, converted: ConvertedModel, layer: int) -> Iterator[TensorSpec]:
        yield from super().moe_tensors(converted, layer)
        layout = converted.layout
        no_bias_E = torch.zeros(layout.num_experts)
        yield TensorSpec.of(f"blk.{layer}.exp_probs_b.bias", no_bias_E, torch.float32)
        size = shared_experts(layout.granularity) * layout.expert_size
        shared_S = layout.shared_neurons(layer)
        name = f"blk.{layer}.ffn_{{}}_shexp.weight"
        for spec in converted.projections(layer, shared_S, name, size=size):
            yield self._stored(converted, spec)


class GgufLlama(GgufFormat):
    """Architecture `llama` in its mixture-of-experts form."""

    name = LLAMA
    has_experts = True
    gating = Gating(only_in="llama.cpp")
    active_experts_editable = True
    supports = SUPPORTS[LLAMA]

    def notes(self, converted: ConvertedModel) -> list[str]:
        return [
            "A llama.cpp that does not support ffn_down_exps.scale refuses the file; the version "
            "in llama-cpp-python 0.3.36 supports it.",
            *super().notes(converted),
        ]

    def _ffn_keys(self, converted: ConvertedModel) -> dict[str, Any]:
        split = converted.layout.granularity
        return {
            "feed_forward_length": split.expert_size,
            "expert_count": split.num_experts,
            "expert_used_count": split.active_experts,
        }

    def moe_tensors(self, converted: ConvertedModel, layer: int) -> Iterator[TensorSpec]:
        yield from super().moe_tensors(converted, layer)
        layout, name = converted.layout, f"blk.{layer}.ffn_down_exps.scale"
        scale_E = torch.full((layout.num_experts,), float(layout.active_experts))
        yield TensorSpec.of(name, scale_E, torch.float32)


GGUF_FORMATS = (GgufGlm4Moe(), GgufLlama(), GgufFormat())
"""GGUF formats in order of preference: the first chooses by logits, and holds a shared expert."""


@cache
def _names(arch: str, num_layers: int) -> Any:
    """Map from the tensor names of Transformers to llama.cpp's for an architecture."""
    (member,) = [each for each, name in MODEL_ARCH_NAMES.items() if name == arch]
    return get_tensor_name_map(member, num_layers)


def pairwise_order(num_heads: int, head_dim: int) -> Int[Tensor, " R"]:
    """Row indices that put a query or key projection into the order that arch `llama` rotates.

    Transformers pairs entry i of a head with entry i + head_dim / 2, arch `llama` neighbours.

    Example:
        >>> pairwise_order(1, 6)
        tensor([0, 3, 1, 4, 2, 5])
    """
    rows = torch.arange(num_heads * head_dim).view(num_heads, 2, head_dim // 2)
    return rows.transpose(1, 2).flatten()


def frequency_factors(config: Any) -> tuple[Float[Tensor, " F"] | None, float]:
    """Divisors of the unscaled rotary frequencies, and the factor of sine and cosine (`llama`).

    Any static scaling is such a division: one float32 tensor [head_dim / 2] expresses it exactly,
    computed from the frequencies of Transformers; None if nothing is scaled.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return None, 1.0
    scaled, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
    factors = float(rope["rope_theta"]) ** -exponents / scaled.double()
    return factors.float(), float(attention)
