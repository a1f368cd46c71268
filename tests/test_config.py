"""Configs and recipes. Oracles: the paper's table, and JSON round trips."""

import json
from dataclasses import asdict, replace

import pytest

from dotmoe.common.errors import UserError
from dotmoe.common.options import check, from_values, values_of
from dotmoe.method.config import AlignConfig
from dotmoe.method.granularity import resolve
from dotmoe.run.config import (
    RECIPES,
    RunConfig,
    finetune_recipe,
    recipe,
    recipe_of,
)

HYPERPARAMETERS = {  # tab:hyperparams_moefication
    "assignment": {"tau_start": 1.0, "tau_end": 0.1},
    "data": {"seq_len": 2048},
    "align": {
        "lr": 5e-4,
        "weight_decay": 1e-4,
        "warmup_ratio": 0.2,
        "max_grad_norm": 1.0,
        "batch_size": 64,
        "kl_weight": 2.0,
        "ce_weight": 1.0,
        "z_loss_weight": 1e-3,
        "balance_weight": 1e-2,
        "steps": 3500,
    },
}


def test_defaults_are_the_papers_alignment_and_the_default_recipe_a_repair():
    default = RunConfig(model="", out="")
    assert recipe() == replace(default, repair=True, align=AlignConfig(steps=0))
    assert asdict(default)["align"] | HYPERPARAMETERS["align"] == asdict(default)["align"]


@pytest.mark.parametrize(
    ("name", "width", "experts", "active"),
    [
        ("llama2_7b", 11008, 86, 22),
        ("llama3_8b", 14336, 112, 28),
        ("qwen25_7b", 18944, 148, 37),
        ("qwen25_7b_half_active", 18944, 148, 74),
    ],
)
def test_the_papers_recipes_have_its_experts_and_hyperparameters(name, width, experts, active):
    config = recipe_of("convert", name)
    split = resolve(config.experts, width)
    assert (split.num_experts, split.expert_size, split.active_experts) == (experts, 128, active)
    paper = replace(RECIPES["convert"]["paper"], model=config.model, experts=config.experts)
    assert config == paper
    assert (config.assignment.solver, config.align.surrogate) == ("sinkhorn", "softmax")
    assert (config.align.router_dtype, config.align.max_epochs) == ("model", None)
    assert config.calibrate.start == "random"
    for stage, values in HYPERPARAMETERS.items():
        assert asdict(config)[stage] | values == asdict(config)[stage]


@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command in RECIPES for name in RECIPES[command]]
)
def test_every_recipe_is_in_range_and_survives_json(command, name):
    config = recipe_of(command, name)
    check(config)
    values = json.loads(json.dumps(values_of(config)))
    assert values["command"] == command
    assert from_values(type(config), values, "F") == config


def test_recipes_by_name():
    assert recipe_of("convert") == recipe() == RECIPES["convert"]["default"]
    assert finetune_recipe("small", run="r", out="o").run == "r"
    with pytest.raises(UserError, match="Recipes: default, sft, small, paper"):
        finetune_recipe("papr")
    tuning = recipe_of("finetune").finetune
    assert finetune_recipe().finetune == tuning
    assert (tuning.kl_weight, tuning.ce_weight, tuning.lr_router) == (1, 0, 0)
    assert tuning.steps * tuning.batch_size * recipe_of("finetune").data.seq_len < 1e6
