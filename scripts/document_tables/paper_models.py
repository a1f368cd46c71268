"""The models of the paper, and what `dotmoe inspect` estimates for them."""

from dataclasses import fields
from typing import Any

import torch
from transformers import LlamaConfig, Qwen2Config

from dotmoe.export.parameters import count_parameters
from dotmoe.measure.config import InspectConfig
from dotmoe.measure.inspection import inspect_model
from dotmoe.method.config import RepairConfig
from dotmoe.method.granularity import Granularity
from dotmoe.models.config import LoadConfig
from dotmoe.models.family import family_of
from dotmoe.models.meta_model import meta_model
from dotmoe.run.config import recipe_of

MODELS = ("LLaMA-2-7B", "LLaMA-3-8B", "Qwen2.5-7B")  # of the paper; one machine aligns each


PAPER_TOKENS = 3_500 * 64 * 2_048
"""Tokens of the paper's alignment."""


def paper_models() -> dict[str, Any]:
    """Configs of the paper's models."""
    sizes = (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "intermediate_size", "max_position_embeddings"),
    )
    models: dict[str, tuple[Any, ...]] = {
        "LLaMA-2-7B": (LlamaConfig, 32, 4_096, 32, 32, 32_000, 11_008, 4_096),
        "LLaMA-3-8B": (LlamaConfig, 32, 4_096, 32, 8, 128_256, 14_336, 8_192),
        "Qwen2.5-7B": (Qwen2Config, 28, 3_584, 28, 4, 152_064, 18_944, 32_768),
        "Qwen2.5-32B": (Qwen2Config, 64, 5_120, 40, 8, 152_064, 27_648, 32_768),
    }
    return {
        model: family(**dict(zip(sizes, values, strict=True)), tie_word_embeddings=False)
        for model, (family, *values) in models.items()
    }


def inspected(model: str, recipe: str, **asked: Any) -> Any:
    """What `dotmoe inspect --gpu h100` estimates for a model of the paper, not measured."""
    start = recipe_of("convert", recipe)
    values = {field.name: getattr(start, field.name) for field in fields(start)}
    asked = values | {"model": model, "load": LoadConfig(device="cpu"), "gpu": "h100"} | asked
    return inspect_model(paper_models()[model], InspectConfig(**asked), stored=torch.bfloat16)


def planned() -> list[Any]:
    """Plans for the paper's models on its machine."""
    rows = []
    for model in MODELS:
        for plan in inspected(model, "paper", gpus=8, finetune_recipe="paper")["plans"]:
            rows.append({"model": model, **plan["recommended"], **plan})
    return rows


def on_one_gpu(model: str) -> list[Any]:
    """Memory, and hours of each stage, of conversions of a model on one H100."""
    rows = []
    for what, recipe, how in (
        ("dotmoe, `--repair-epochs 0`", "default", RepairConfig(repair_epochs=0)),
        ("dotmoe", "default", RepairConfig()),
        ("DOT-MoE (paper), a quarter active", "paper", RepairConfig()),
    ):
        stages = inspected(model, recipe, gpus=1, repairing=how)["conversions"][0]["stages"]
        row = {"what": what, "memory": max(stage["memory_total"] for stage in stages)}
        rows.append(row | {"took": {stage["stage"]: stage["hours"] for stage in stages}})
    return rows


def trained() -> list[Any]:
    """Share of the paper's models that its alignment trains: A and W_r, experts of 128 neurons."""
    rows = []
    for model, config in paper_models().items():
        experts = config.intermediate_size // 128
        split = Granularity(num_experts=experts, expert_size=128, active_experts=experts // 4)
        total = count_parameters(meta_model(config), family_of(config), (split,)).dense_total
        learned = experts * (config.intermediate_size + config.hidden_size)
        rows.append({"model": model, "share": learned * config.num_hidden_layers / total})
    return rows
