"""What all exported Transformers architectures share: a decoder in LLaMA's form with new FFNs."""

import shutil
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dotmoe.checkpoint.tensors import EMBEDDING, HEAD, NORM
from dotmoe.export import tensors as specs
from dotmoe.export.format import Conversion, Format, TensorSpec
from dotmoe.export.safetensors_file import write_checkpoint
from dotmoe.export.server_limits import limits_met
from dotmoe.export.verify import Verification, verify
from dotmoe.files import read_json, write_json
from dotmoe.granularity import Granularity
from dotmoe.models.dense import DenseModel

if TYPE_CHECKING:
    from dotmoe.export import ExportConfig

_COPIED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "rms_norm_eps", "initializer_range", "attention_dropout", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


class TransformersFormat(Format):
    """A Transformers checkpoint: config.json, safetensors, tokenizer. A subclass adds its own."""

    class_name: str
    experts_key: str = "num_experts"
    router_name: str = "mlp.gate.weight"
    block_name: str = "mlp"
    block_has_shared: bool = True
    """Whether the output of a block contains that of the shared expert."""
    block_error: float = 4e-3
    """Largest median relative error of a block in float32. Random routers come to 3e-4, a real
    model's at k = E / 2 to 1.5e-3, twice that where p was lowered by one for the first token."""

    def exactness(self, conversion: Conversion) -> str:
        """See `Format.exactness`."""
        factor = "E" if self.active_experts_editable else "k"
        return f"expert weights rounded once, down projections times {factor}; {self.gates}"

    gates: str = "gates 1 but for about 2^-11"

    def notes(self, conversion: Conversion) -> list[str]:
        """See `Format.notes`."""
        dense = conversion.dense
        notes = [
            "For inference only: the scaled router passes almost no gradient. Fine-tune before "
            "export.",
            *self.own_notes(conversion.granularity),
        ]
        if self.context(dense) < dense.widths.context:
            notes.append(
                f"The dense model attends through a sliding window of {self.context(dense)} "
                f"tokens, which {self.name} has not: max_position_embeddings is lowered from "
                f"{dense.widths.context} to the window, up to which the two are the same."
            )
        return [*notes, *limits_met(self.header(conversion))]

    def own_notes(self, split: Granularity) -> list[str]:
        """What is special to this architecture."""
        return [
            f"{self.active_experts_key} cannot be edited: k is folded into the down projections. "
            "Export the run again with another --active-experts."
        ]

    def header(self, conversion: Conversion) -> dict[str, Any]:
        """Content of config.json."""
        split = conversion.granularity
        return {
            "architectures": [self.class_name],
            "model_type": self.name,
            **decoder_config(conversion.dense, conversion.dtype, self.context(conversion.dense)),
            self.experts_key: split.num_experts,
            self.active_experts_key: split.active_experts,
            **self.moe_config(conversion.dense, split),
            "output_router_logits": False,
        }

    @abstractmethod
    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        """What config.json says of the experts besides E and k."""

    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        """See `Format.tensors`."""
        specs.require_no_others(conversion, self.name)
        yield specs.carried(conversion, EMBEDDING)
        for layer in range(conversion.layout.num_layers):
            for name in specs.carried_names(conversion.dense, layer):
                yield specs.carried(conversion, name)
            if layer in conversion.layout.moe_layers:
                yield from self.moe_tensors(conversion, layer)
            else:
                yield from specs.dense_ffn(conversion, layer)
        yield specs.carried(conversion, NORM)
        yield specs.carried(conversion, HEAD)

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        """Router and experts of a split layer."""
        prefix = f"model.layers.{layer}"
        yield specs.router(conversion, layer, f"{prefix}.{self.router_name}")
        yield from specs.experts(
            conversion,
            layer,
            lambda expert, projection: f"{prefix}.{self.expert_tensor(expert, projection)}",
            factor=self.gating(conversion.granularity).constant,
        )

    def expert_tensor(self, expert: int, projection: str) -> str:
        """Name of an expert's projection within its layer."""
        return f"mlp.experts.{expert}.{projection}_proj.weight"

    def write(self, conversion: Conversion, folder: Path, config: "ExportConfig") -> list[str]:
        """See `Format.write`."""
        dense = conversion.dense
        write_json(folder / "config.json", self.header(conversion))
        dense.tokenizer.save_pretrained(folder)
        generation = dense.folder / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
        max_bytes = int(config.max_shard_gib * 2**30)
        files = write_checkpoint(self.tensors(conversion), folder, max_bytes)
        conversion.tensors.forget()
        return files

    def check(
        self, conversion: Conversion, folder: Path, tokens_BT: Int[Tensor, "B T"]
    ) -> tuple[Verification, list[str]]:
        """See `Format.check`."""
        return verify(self, conversion, folder, tokens_BT)

    def with_active_experts(self, folder: Path, active_experts: int) -> tuple[Path, Path]:
        """See `Format.with_active_experts`."""
        path, changed = folder / "config.json", folder / ".config.json.new"
        write_json(changed, read_json(path) | {self.active_experts_key: active_experts})
        return changed, path

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The FFN blocks of a reloaded model, by layer; each maps [B, T, D] to [B, T, D]."""
        layers = cast(nn.ModuleList, model.get_submodule("model.layers"))
        return [layer.get_submodule(self.block_name) for layer in layers]

    def router(self, block: nn.Module) -> nn.Module:
        """The router of a reloaded block; called with [T, D] it gives the chosen experts last."""
        return block.get_submodule("gate")

    def chosen_experts(self, block: nn.Module, x_TD: Tensor) -> Tensor:
        """Numbers of the k experts that a reloaded block runs for each token, [T, K]."""
        return cast(Tensor, self.router(block)(x_TD)[2])

    def run_active_experts(self, model: nn.Module, layers: range, active_experts: int) -> None:
        """Give the split layers of a reloaded model another k."""
        assert self.active_experts_editable, self.name
        setattr(cast(Any, model).config, self.active_experts_key, active_experts)
        blocks = self.blocks(model)
        for layer in layers:
            cast(Any, self.router(blocks[layer])).top_k = active_experts


def decoder_config(dense: DenseModel, dtype: torch.dtype, context: int) -> dict[str, Any]:
    """Everything of config.json that does not depend on experts.

    Rotary settings and dtype are written twice: a runtime that knows only `rope_theta` falls back
    to its own default when it finds `rope_parameters` alone, and computes something else.

    Args:
        dense: The model that is exported.
        dtype: Dtype of the written weights.
        context: Longest context to state, in tokens.
    """
    source = dense.config
    rope = dict(source.rope_parameters)
    theta = rope.pop("rope_theta")
    rope.pop("type", None)
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        **{key: getattr(source, key, None) for key in _COPIED},
        "hidden_act": "silu",
        "intermediate_size": source.intermediate_size,
        "head_dim": dense.family.traits(source).head_dim,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else dict(rope),
        "rope_parameters": {**rope, "rope_theta": theta},
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    }
