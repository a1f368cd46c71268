"""Configs of models, and what is inspected of them, for all tests here."""

import torch
from transformers import LlamaConfig

from dotmoe.granularity import ExpertsConfig, resolve
from dotmoe.inspection.device_time import DeviceRates
from dotmoe.inspection.inspect_model import inspect_model
from dotmoe.inspection.sizes import RunSize, sizes_of
from dotmoe.models.family import family_of
from dotmoe.parameters import count_parameters

RATES = DeviceRates(device="a test", dtype="float32", flops_per_s=1e12, bytes_per_s=1e10)


TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2_048,
}


def tiny(kind=LlamaConfig, **changes):
    return kind(**{**TINY, "tie_word_embeddings": False, "sliding_window": None, **changes})


def llama_3_8b():
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def inspection(
    config,
    run=None,
    *,
    stored=torch.bfloat16,
    export_dtype="source",
    rates=RATES,
    machines=None,
    **experts,
):
    return inspect_model(
        config,
        family_of(config),
        ExpertsConfig(**experts),
        run or RunSize(bytes_per_weight=2),
        stored=stored,
        export_dtype=export_dtype,
        rates=rates,
        machines=machines,
    )


def sizes(config, *, bytes_held=2, written=torch.bfloat16, **experts):
    family = family_of(config)
    split = resolve(ExpertsConfig(**experts), config.intermediate_size)
    return sizes_of(
        config,
        family.traits(config),
        split,
        count_parameters(config, family, split),
        stored=torch.bfloat16,
        written=written,
        bytes_held=bytes_held,
    )
