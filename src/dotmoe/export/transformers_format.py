"""Base class of the Transformers formats: a decoder in LLaMA's form with MoE FFNs."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from dotmoe.common.files import require_free, save_tensors, write_json
from dotmoe.common.progress import Update, no_update
from dotmoe.export.format import BIASES, PROJECTIONS, ConvertedModel, Format, TensorSpec
from dotmoe.export.verify import Reloadable, verify
from dotmoe.method.granularity import GROUPED_MATMUL_BYTES, Granularity, Splits, fitting_sizes
from dotmoe.models.checkpoint import DTYPES, INDEX, dtype_name
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hf_config import rope_of
from dotmoe.models.tokenizer import copy_beside_weights

_COPIED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "initializer_range",
    "attention_dropout",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
GATES = "gates are 1 except for the deviations below"
_GRANITE = ("granitemoe", "granitemoeshared")
_SCALES_IN_SGLANG = ("glm4_moe", "qwen3_moe")
"""Types of which SGLang reads and computes RoPE scaling by itself."""


class _Fault(NamedTuple):
    """What servers get wrong with a feature of exports in some formats."""

    feature: str
    servers: tuple[str, ...]
    formats: tuple[str, ...]
    """Each a `model_type`."""
    says: str
    """What they do instead, or the remedy."""


_FAULTS = (
    _Fault(
        "biases",
        ("vLLM",),
        ("qwen3_moe",),
        "The output projection of attention has no bias: o_proj.bias is silently dropped.",
    ),
    _Fault(
        "biases",
        ("vLLM", "SGLang"),
        _GRANITE,
        "Attention has no biases: all of them are silently dropped.",
    ),
    _Fault(
        "shared experts",
        ("SGLang",),
        ("glm4_moe",),
        "On NVIDIA GPUs the shared expert runs as one more routed expert, which works for a "
        "single one only: with more, loading fails unless --disable-shared-experts-fusion is "
        "given.",
    ),
    _Fault(
        "head width",
        ("SGLang",),
        ("mixtral",),
        "head_dim is not read: heads wider than hidden_size / heads are silently truncated, "
        "with narrower ones loading fails.",
    ),
    _Fault(
        "scaled RoPE",
        ("SGLang",),
        ("mixtral", *_GRANITE),
        "RoPE scaling is not read, and rope_theta is truncated to an integer.",
    ),
    _Fault(
        "window",
        ("SGLang",),
        ("mixtral",),
        "The sliding window is not read: correct only up to the window (--context-length).",
    ),
    _Fault(
        "dense layers",
        ("SGLang",),
        ("qwen3_moe",),
        "Every layer is built with experts, whatever mlp_only_layers contains: a dense layer's "
        "tensors are skipped and its experts stay uninitialised.",
    ),
    _Fault(
        "longrope",
        ("vLLM",),
        ("glm4_moe", "mixtral", *_GRANITE),
        "longrope uses its long factors for every text, unless --max-model-len is at most "
        "original_max_position_embeddings.",
    ),
    _Fault(
        "longrope",
        ("SGLang",),
        _SCALES_IN_SGLANG,
        "longrope uses its long factors for all requests of a batch in which one is longer than "
        "original_max_position_embeddings.",
    ),
    _Fault(
        "dynamic RoPE",
        ("SGLang",),
        _SCALES_IN_SGLANG,
        "dynamic RoPE scaling is applied to every text, not to long ones alone: the results are "
        "another model's.",
    ),
    _Fault(
        "dynamic RoPE",
        ("vLLM",),
        ("glm4_moe", "mixtral", "qwen3_moe", *_GRANITE),
        "dynamic RoPE scaling has no positions beyond max_position_embeddings, which the default "
        "context exceeds: give --max-model-len of at most that.",
    ),
    _Fault(
        "attention_factor",
        ("SGLang",),
        _SCALES_IN_SGLANG,
        "attention_factor of yarn is not read: 0.1 ln(factor) + 1 is taken.",
    ),
    _Fault(
        "any",
        ("vLLM",),
        ("glm4_moe",),
        "Use 0.23.0 or later: before, Blackwell GPUs silently divide the weights of chosen "
        "experts by their sum.",
    ),
    _Fault(
        "any",
        ("SGLang",),
        ("glm4_moe",),
        "Use 0.5.23 or later: before, Blackwell GPUs need --moe-runner-backend triton.",
    ),
    _Fault(
        "small experts",
        ("vLLM",),
        ("glm4_moe",),
        "Blackwell GPUs can hang at the start unless an expert's size on each GPU is a multiple "
        "of 128: give --moe-backend triton.",
    ),
    _Fault(
        "many active",
        ("vLLM",),
        ("mixtral", "qwen3_moe", *_GRANITE),
        "Blackwell GPUs run at most 32 experts per token: for more, give --moe-backend triton.",
    ),
    _Fault(
        "many active",
        ("SGLang",),
        ("glm4_moe", "qwen3_moe"),
        "Blackwell GPUs run at most 32 experts per token: for more, give --moe-runner-backend "
        "triton.",
    ),
)
"""Each was found in the server's source; tests/serving records where."""


class TransformersFormat(Reloadable):
    """A Transformers checkpoint: config.json, safetensors, tokenizer; subclasses per model type."""

    servers: tuple[str, ...] = ("Transformers", "vLLM", "SGLang")
    rope_types = (*Format.rope_types, "longrope")
    experts_key: str = "num_experts"
    size_key: str = "moe_intermediate_size"
    """Key of config.json for the expert size."""
    constants: ClassVar[dict[str, Any]] = {}
    """Additional constant entries of config.json."""
    stored_block: str = "mlp"
    """Name of the FFN block in the files."""
    router_weight: str = "weight"
    projection_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's projections (gate, up, down) in the files."""
    check = verify

    def unsupported(self, dense: DenseModel, splits: Splits, dtype: torch.dtype) -> str | None:
        of_format = super().unsupported(dense, splits, dtype)
        return of_format or self._misread(dense) or self.no_kernel(dense, splits[0], dtype)

    def _misread(self, dense: DenseModel) -> str | None:
        """Reason why servers would run texts longer than the export's context, or None."""
        is_linear = rope_of(dense.config)["rope_type"] == "linear"
        if not is_linear or self.context(dense) == dense.widths.context:
            return None
        return (
            f"{dense.source} has rope_type 'linear' together with a sliding window: servers take "
            f"factor x max_position_embeddings as context, which {self.name} must lower to the "
            "window."
        )

    def no_kernel(self, dense: DenseModel, split: Granularity, dtype: torch.dtype) -> str | None:
        """Reason why stock Transformers cannot run experts of this size, or None."""
        if split.num_experts < 2:
            return f"The layout has one expert a layer, but {self.name} needs at least 2."
        multiple = GROUPED_MATMUL_BYTES // dtype.itemsize
        kind = dtype_name(dtype)
        rule = f"but in {kind} the grouped matrix product that runs the experts takes multiples of"
        if (width := dense.widths.model) % multiple:
            return f"The model width is {width}, {rule} {multiple} only. Choose another model."
        if split.expert_size % multiple == 0:
            return None
        sizes = fitting_sizes(split.units)
        remedy = "Choose such an expert_size, or another model."
        if not any(size % multiple == 0 for size in sizes):
            remedy = f"No such size divides the FFN width {split.units:,}. Choose another model."
            if any(size % (GROUPED_MATMUL_BYTES // 4) == 0 for size in sizes):
                remedy = remedy.replace("Choose", "Give --export-dtype float32, or choose")
        return f"expert_size is {split.expert_size}, {rule} {multiple} only. {remedy}"

    def exactness(self, converted: ConvertedModel) -> str:
        return f"expert weights are rounded once, down projections times k; {GATES}"

    def notes(self, converted: ConvertedModel) -> list[str]:
        router = f"{self.router_name}.{self.router_weight}".removesuffix(".weight")
        kept = json.dumps(["lm_head", f"re:.*{router}$"])
        notes = [
            "For inference only: the scaled router passes almost no gradient. Fine-tune before "
            "export.",
            "A checkpoint that is quantised further must keep routers and head as they are (llm-"
            f"compressor: `ignore={kept}`). This was not run.",
        ]
        if not self.active_experts_editable:
            notes.append(
                f"{self.active_experts_key} cannot be edited: k is folded into the down "
                "projections. Export the run again with another --active-experts."
            )
        return [*notes, *super().notes(converted), *server_faults(self.header(converted))]

    def header(self, converted: ConvertedModel) -> dict[str, Any]:
        split = converted.layout.granularity
        return self.config(converted.dense, split, converted.dtype_name)

    def config(self, dense: DenseModel, split: Granularity, dtype: str) -> dict[str, Any]:
        """Content of config.json, with old and new keys of rotary settings and dtype."""
        of_experts = {
            "architectures": [CLASSES[self.name]],
            "model_type": self.name,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "dtype": dtype,
            self.experts_key: split.num_experts,
            self.active_experts_key: split.active_experts,
            self.size_key: split.expert_size,
            "output_router_logits": False,
            **self.constants,
        }
        if self.twin_of:
            return config_of_dense(dense) | of_experts
        traits = dense.traits
        rope = {key: each for key, each in dense.config.rope_parameters.items() if key != "type"}
        theta = rope.pop("rope_theta")
        config = {
            **{key: getattr(dense.config, key, None) for key in _COPIED},
            "hidden_act": "silu",
            "intermediate_size": dense.widths.ffn,
            "head_dim": traits.head_dim,
            "max_position_embeddings": self.context(dense),
            "rope_theta": theta,
            "rope_scaling": None if rope["rope_type"] == "default" else dict(rope),
            "rope_parameters": {**rope, "rope_theta": theta},
            **of_experts,
        }
        if rope["rope_type"] == "longrope":  # Transformers 4.5x reads it at the top level alone
            key = "original_max_position_embeddings"
            config[key] = rope[key]
        if self.supports_window:
            config["sliding_window"] = traits.sliding_window
        if set(BIASES) & {*self.supports}:
            config["attention_bias"] = traits.qkv_bias
        return config

    def moe_tensors(self, converted: ConvertedModel, layer: int) -> Iterator[TensorSpec]:
        prefix = f"model.layers.{layer}.{self.stored_block}"
        yield converted.router(layer, f"{prefix}.{self.router_name}.{self.router_weight}")
        yield from self.experts(converted, layer, prefix)

    def experts(self, converted: ConvertedModel, layer: int, prefix: str) -> Iterator[TensorSpec]:
        """Specs of the tensors of a split layer's block, except the router."""
        layout = converted.layout
        constant = self.gating.constant(layout.active_experts)
        neurons_ES = layout.neurons_of_expert(layer)
        # Projections in the outer loop, so that the slices of one dense matrix are consecutive.
        for projection, stored_name in zip(PROJECTIONS, self.projection_names, strict=True):
            factor = constant if projection == "down" else 1.0
            for expert, neurons_S in enumerate(neurons_ES):
                name = f"{prefix}.experts.{expert}.{stored_name}.weight"
                yield converted.projection(layer, projection, neurons_S, name, factor)

    def write(self, converted: ConvertedModel, folder: Path) -> list[str]:
        write_json(folder / "config.json", self.header(converted))
        copy_beside_weights(converted.dense, folder)
        most = int(converted.config.max_shard_gib * 2**30)
        files = write_checkpoint(self.tensors(converted), folder, most, converted.on_progress)
        converted.tensors.forget()
        return files


def config_of_dense(dense: DenseModel) -> dict[str, Any]:
    """Content of a dense model's config.json, without what it says of its file."""
    left_out = ("transformers_version", "_name_or_path", "id2label", "label2id")
    return {key: each for key, each in dense.config.to_dict().items() if key not in left_out}


def server_faults(config: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing that a server gets wrong with an exported config."""
    rope = config["rope_parameters"]
    window = config.get("sliding_window")
    size = config.get("moe_intermediate_size", config["intermediate_size"])
    has = {
        "biases": config.get("attention_bias"),
        "shared experts": config.get("n_shared_experts", 0) > 1,
        "head width": config["head_dim"] * config["num_attention_heads"] != config["hidden_size"],
        "scaled RoPE": rope["rope_type"] != "default" or rope["rope_theta"] % 1 != 0,
        "window": window is not None and window < config["max_position_embeddings"],
        "dense layers": config.get("mlp_only_layers"),
        "longrope": rope["rope_type"] == "longrope",
        "dynamic RoPE": rope["rope_type"] == "dynamic",
        "attention_factor": rope["rope_type"] == "yarn" and rope.get("attention_factor"),
        "any": True,
        "small experts": size % (128 * 8) != 0,  # on up to 8 GPUs
        # k of glm4_moe can be edited, up to E.
        "many active": config.get("n_routed_experts", config["num_experts_per_tok"]) > 32,
    }
    return [
        f"{server}: {fault.says}"
        for fault in _FAULTS
        if config["model_type"] in fault.formats and has[fault.feature]
        for server in fault.servers
    ]


def write_checkpoint(
    specs: Iterable[TensorSpec], folder: Path, max_bytes: int, on_progress: Update = no_update
) -> list[str]:
    """Write `model.safetensors`, or `model-0000i-of-0000n.safetensors` with an index.

    Memory holds the tensors of one file. Files have at most `max_bytes`; a single larger tensor
    gets a file of its own. Returns the names of the weight files, in order.
    """
    specs = list(specs)
    by_name = {spec.name: spec for spec in specs}
    assert len(by_name) == len(specs), "two tensors have the same name"
    # Some servers crash on tensors without elements.
    assert all(spec.num_bytes for spec in by_name.values()), "a tensor is empty"
    plan = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda spec: spec.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    total = sum(spec.num_bytes for spec in by_name.values())
    done = count(1)
    require_free(folder, total)
    for file_name, names in plan.filename_to_tensors.items():
        tensors = dict[str, Tensor]()
        for name in names:
            spec = by_name[name]
            tensors[spec.name] = tensor = spec.make().to(DTYPES[spec.stored]).contiguous()
            assert tuple(tensor.shape) == spec.shape, f"{spec.name} is {tuple(tensor.shape)}"
            on_progress(next(done), len(by_name), "tensors written")
        save_tensors(tensors, folder / file_name, format="pt")
    if plan.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": plan.tensor_to_filename}
        write_json(folder / INDEX, index)
    return list(plan.filename_to_tensors)
