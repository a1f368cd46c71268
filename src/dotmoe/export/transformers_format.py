"""What all exported Transformers architectures share: a decoder in LLaMA's form with new FFNs."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor, nn

from dotmoe.checkpoint.tensors import EMBEDDING, HEAD, NORM
from dotmoe.export import tensors as specs
from dotmoe.export.format import Conversion, Format, Gating, TensorSpec
from dotmoe.export.safetensors_file import write_checkpoint
from dotmoe.export.server_limits import limits_met
from dotmoe.export.verify import verify
from dotmoe.files import read_json, write_json
from dotmoe.granularity import Granularity
from dotmoe.models.dense import DenseModel

_COPIED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "rms_norm_eps", "initializer_range", "attention_dropout", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


class TransformersFormat(Format):
    """A Transformers checkpoint: config.json, safetensors, tokenizer. A subclass adds its own."""

    class_name: str
    experts_key: str = "num_experts"
    block_name: str = "mlp"
    stored_block: str = "mlp"
    """Name of the block in the files."""
    router_name: str = "gate"
    """The router within the block; called with [T, D] it gives the chosen experts last."""
    router_weight: str = "weight"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """An expert's projections in the files."""
    block_has_shared: bool = True
    """Whether the output of a block contains that of the shared expert."""
    block_error: float = 4e-3
    """Largest median relative error of a block in float32. Random routers come to 3e-4, a real
    model's at k = E / 2 to 1.5e-3."""
    score: Literal["softmax", "softmax_of_chosen"] = "softmax"
    check = verify
    folds: bool = True
    """Whether a constant other than a power of two is folded into the down projections."""
    casts_weights: bool = True
    """Transformers rounds the weights of the experts to the dtype of the model."""
    gates: str = "gates 1 but for about 2^-11"

    def gating(self, granularity: Granularity) -> Gating:
        """See `Format.gating`: a softmax over all, renormalised over the chosen k."""
        return Gating(
            score=self.score,
            renormalised=True,
            constant=float(granularity.active_experts),
            cast_to_model_dtype=self.casts_weights,
            logits_in_model_dtype=True,
        )

    def exactness(self, conversion: Conversion) -> str:
        factor = "E" if self.active_experts_editable else "k"
        return f"expert weights rounded once, down projections times {factor}; {self.gates}"

    def notes(self, conversion: Conversion) -> list[str]:
        folded = (
            f"{self.active_experts_key} cannot be edited: k is folded into the down projections. "
            "Export the run again with another --active-experts."
        )
        return [
            "For inference only: the scaled router passes almost no gradient. Fine-tune before "
            "export.",
            *([] if self.active_experts_editable else [folded]),
            *super().notes(conversion),
            *limits_met(self.header(conversion)),
        ]

    def header(self, conversion: Conversion) -> dict[str, Any]:
        """Content of config.json.

        Rotary settings and dtype are written twice: a runtime that knows only `rope_theta` falls
        back to its own default when it finds `rope_parameters` alone.
        """
        dense, split = conversion.dense, conversion.granularity
        rope = {key: each for key, each in dense.config.rope_parameters.items() if key != "type"}
        theta = rope.pop("rope_theta")
        dtype = str(conversion.dtype).removeprefix("torch.")
        return {
            "architectures": [self.class_name],
            "model_type": self.name,
            **{key: getattr(dense.config, key, None) for key in _COPIED},
            "hidden_act": "silu",
            "intermediate_size": dense.widths.ffn,
            "head_dim": dense.family.traits(dense.config).head_dim,
            "max_position_embeddings": self.context(dense),
            "rope_theta": theta,
            "rope_scaling": None if rope["rope_type"] == "default" else dict(rope),
            "rope_parameters": {**rope, "rope_theta": theta},
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "dtype": dtype,
            self.experts_key: split.num_experts,
            self.active_experts_key: split.active_experts,
            **self.moe_config(dense, split),
            "output_router_logits": False,
        }

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        """What config.json says of the experts besides E and k."""
        return {}

    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        specs.require_no_others(conversion, self.name)
        yield specs.carried(conversion, EMBEDDING)
        for layer in range(conversion.layout.num_layers):
            for name in specs.carried_names(conversion.dense, layer):
                yield specs.carried(conversion, name)
            if layer in conversion.layout.moe_layers:
                prefix = f"model.layers.{layer}.{self.stored_block}"
                weight = f"{prefix}.{self.router_name}.{self.router_weight}"
                yield specs.router(conversion, layer, weight)
                yield from self.expert_tensors(conversion, layer, prefix)
            else:
                for projection in specs.PROJECTIONS:
                    name = conversion.dense.family.ffn_tensor(layer, projection)
                    yield specs.carried(conversion, name)
        yield specs.carried(conversion, NORM)
        yield specs.carried(conversion, HEAD)

    def expert_tensors(
        self, conversion: Conversion, layer: int, prefix: str
    ) -> Iterator[TensorSpec]:
        """What a split layer's block holds besides the router."""
        constant = self.gating(conversion.granularity).constant
        neurons_ES = conversion.layout.neurons_of_expert(layer)
        # Projection outside, expert inside: the slices of one dense matrix follow each other.
        for projection, part in zip(specs.PROJECTIONS, self.parts, strict=True):
            factor = constant if projection == "down" else 1.0
            for expert, neurons_S in enumerate(neurons_ES):
                name = f"{prefix}.experts.{expert}.{part}.weight"
                yield specs.neurons(conversion, layer, projection, neurons_S, name, factor=factor)

    def write(self, conversion: Conversion, folder: Path) -> list[str]:
        dense = conversion.dense
        write_json(folder / "config.json", self.header(conversion))
        dense.tokenizer.save_pretrained(folder)
        generation = dense.folder / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
        max_bytes = int(conversion.config.max_shard_gib * 2**30)
        files = write_checkpoint(
            self.tensors(conversion), folder, max_bytes, conversion.on_progress
        )
        conversion.tensors.forget()
        return files

    def with_active_experts(self, folder: Path, active_experts: int) -> tuple[Path, Path]:
        path, changed = folder / "config.json", folder / ".config.json.new"
        write_json(changed, read_json(path) | {self.active_experts_key: active_experts})
        return changed, path

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The FFN blocks of a reloaded model, by layer; each maps [B, T, D] to [B, T, D]."""
        layers = cast(nn.ModuleList, model.get_submodule("model.layers"))
        return [layer.get_submodule(self.block_name) for layer in layers]

    def routed(self, model: nn.Module, target: str) -> list[tuple[nn.Module, nn.Module]]:
        """By layer what is called with the router's input, and what gives out the experts' sum."""
        return [(block, block) for block in self.blocks(model)]

    def chosen_experts(self, block: nn.Module, x_TD: Tensor) -> Tensor:
        """Numbers of the k experts that a reloaded block runs for each token, [T, K]."""
        return cast(Tensor, block.get_submodule(self.router_name)(x_TD)[2])

    def run_active_experts(self, model: nn.Module, layers: range, active_experts: int) -> None:
        """Give the split layers of a reloaded model another k."""
        assert self.active_experts_editable, self.name
        setattr(cast(Any, model).config, self.active_experts_key, active_experts)
        blocks = self.blocks(model)
        for layer in layers:
            cast(Any, blocks[layer].get_submodule(self.router_name)).top_k = active_experts
