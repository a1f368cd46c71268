"""Stock models without weights, and what no checkpoint stores of them."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM


def meta_model(config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """The stock model of a config, frozen, without storage, in `dtype` or the config's dtype."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype or config.dtype
        )
    return model.requires_grad_(False).eval()


def compute_constants(model: nn.Module, device: torch.device) -> None:
    """Recreate the modules with buffers that no checkpoint stores: rotary frequencies."""
    config = model.config
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            buffers = {key for key, _ in child.named_buffers(recurse=False)}
            if "embed_scale" in buffers:
                child.embed_scale = torch.tensor(child.scalar_embed_scale, device=device)
            elif buffers - child.state_dict().keys():
                own = getattr(child, "config", config)
                setattr(parent, name, type(child)(own).to(device).train(child.training))


def num_parameters(module: nn.Module) -> int:
    """Parameters of a module; a tied head is counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
