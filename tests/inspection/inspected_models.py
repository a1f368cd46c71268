"""Configs of models, and what is inspected of them, for all tests here."""

from dataclasses import fields
from functools import partial

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from document_tables.paper_models import paper_models
from dotmoe.export.config import ExportConfig
from dotmoe.measure.config import InspectConfig
from dotmoe.measure.inspection import inspect_model
from dotmoe.measure.inspection.accelerators import Accelerator
from dotmoe.measure.inspection.sizes import Sizes, Step
from dotmoe.method.config import AlignConfig, ExpertsConfig, RepairConfig
from dotmoe.method.granularity import resolve
from dotmoe.method.masked import Masking, masked_ffn
from dotmoe.method.router import Routing
from dotmoe.models.config import LoadConfig
from dotmoe.models.family import family_of
from dotmoe.models.meta_model import meta_model
from dotmoe.text.config import AnswersConfig, DataConfig

HERE = Accelerator(
    name="this CPU",
    dtype="float32",
    flops_per_s=1e12,
    bytes_per_s=1e10,
    memory_bytes=10**11,
    on_cpu=True,
    origin="measured",
)
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
SPLIT = {field.name for field in fields(ExpertsConfig)}


def tiny(kind=LlamaConfig, **changes):
    return kind(**{**TINY, "tie_word_embeddings": False, "sliding_window": None, **changes})


def llama_3_8b(**changes):
    return LlamaConfig(**paper_models()["LLaMA-3-8B"].to_dict() | changes)


def inspection(config, *, stored=torch.bfloat16, here=HERE, **options):
    stated = {"shared": 0.0} | {name: options.pop(name) for name in SPLIT & options.keys()}
    if not {"active", "active_experts"} & stated.keys():
        stated["active"] = 0.25
    experts = ExpertsConfig(**stated)
    nested = {
        "load": {"device": "cpu"},
        "align": {},
        "data": {},
        "export": {},
        "repairing": {},
        "answers": {},
    }
    kinds = {"data": DataConfig, "export": ExportConfig, "repairing": RepairConfig}
    kinds |= {"load": LoadConfig, "align": AlignConfig, "answers": AnswersConfig}
    for part, kind in kinds.items():
        own = {field.name for field in fields(kind)} & options.keys()
        nested[part] = kind(**nested[part] | {name: options.pop(name) for name in own})
    asked = InspectConfig(experts=experts, model="any", **nested, **options)
    return inspect_model(config, asked, stored=stored, here=here)


def sizes(config, *, written=torch.bfloat16, **experts):
    split = resolve(ExpertsConfig(**experts), config.intermediate_size)
    return Sizes(meta_model(config), (split,), stored=torch.bfloat16, written=written)


def step(found, **changes):
    """A step of the paper's batch and length, four sequences at once."""
    plain = {"batch_size": 64, "seq_len": 2_048, "micro_batch_size": 4}
    return Step(sizes=found, **plain | changes)


def masked_model(config, dtype, num_experts):
    family, layers, neurons = family_of(config), config.num_hidden_layers, config.intermediate_size
    model = AutoModelForCausalLM.from_config(config).to(dtype).requires_grad_(False).eval()
    masking = Masking(
        expert_of_neuron_LN=(torch.arange(neurons) % num_experts).repeat(layers, 1),
        router_LED=torch.nn.Parameter(torch.randn(layers, num_experts, config.hidden_size)),
        plan_LNE=torch.rand(layers, neurons, num_experts).requires_grad_(),
        routing=Routing(active_experts=num_experts // 4, surrogate="soft_top_k"),
    )
    for index, layer in enumerate(family.layers(model)):
        ffn = layer.mlp
        ffn.forward = partial(masked_ffn, ffn.forward, family.ffn(layer), masking, index)
    return model
