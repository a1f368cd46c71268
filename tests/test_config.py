"""Configs and recipes. Oracles: the paper's table, and JSON round trips."""

import json
from dataclasses import asdict

import pytest

from dotmoe.config import RunConfig, as_json, from_json
from dotmoe.errors import UserError
from dotmoe.granularity import resolve
from dotmoe.recipes import RECIPES, recipe_named

HYPERPARAMETERS = {  # tab:hyperparams_moefication
    ("assignment", "sinkhorn_sweeps"): 50,
    ("assignment", "tau_start"): 1.0,
    ("assignment", "tau_end"): 0.1,
    ("align", "lr"): 5e-4,
    ("align", "weight_decay"): 1e-4,
    ("align", "warmup_ratio"): 0.2,
    ("align", "max_grad_norm"): 1.0,
    ("align", "batch_size"): 64,
    ("data", "seq_len"): 2048,
    ("align", "kl_weight"): 2.0,
    ("align", "ce_weight"): 1.0,
    ("align", "z_loss_weight"): 1e-3,
    ("align", "balance_weight"): 1e-2,
    ("align", "steps"): 3500,
}


@pytest.mark.parametrize("recipe", ["default", "paper", "llama2_7b", "llama3_8b", "qwen25_7b"])
def test_defaults_and_the_papers_recipes_have_the_papers_hyperparameters(recipe):
    config = asdict(recipe_named(recipe))
    for (stage, name), value in HYPERPARAMETERS.items():
        assert config[stage][name] == value, f"{stage}.{name}"


@pytest.mark.parametrize(
    ("recipe", "width", "experts", "active"),
    [
        ("llama2_7b", 11008, 86, 22),
        ("llama3_8b", 14336, 112, 28),
        ("qwen25_7b", 18944, 148, 37),
        ("qwen25_7b_half_active", 18944, 148, 74),
    ],
)
def test_the_papers_three_models_have_its_experts(recipe, width, experts, active):
    config = recipe_named(recipe)
    split = resolve(config.experts, width)
    assert (split.num_experts, split.expert_size, split.active_experts) == (experts, 128, active)
    assert (config.assignment.solver, config.align.surrogate) == ("sinkhorn", "softmax")
    assert config.calibrate.start == "random"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name, tmp_path):
    config = recipe_named(name)
    file = tmp_path / "config.json"
    file.write_text(as_json(config))
    assert from_json(file, RunConfig) == config


def test_a_config_with_some_fields_takes_defaults_for_the_rest(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model": "m", "out": "o", "align": {"lr": 1}}')
    config = from_json(file, RunConfig)
    assert isinstance(config, RunConfig)
    assert (config.align.lr, config.align.steps) == (1, 3500)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("{", "is not JSON"),
        ("[]", "one JSON object"),
        ('{"model": "m", "out": "o", "sed": 1}', "sed .*Did you mean seed"),
        ('{"model": "m", "out": "o", "align": {"stps": 1}}', "stps .*Did you mean steps"),
        ('{"model": "m", "out": "o", "seed": "1"}', "seed .*is '1'"),
        ('{"model": "m", "out": "o", "align": {"surrogate": "hard"}}', "surrogate .*'hard'"),
        ('{"model": "m"}', "out"),
    ],
)
def test_a_bad_config_file_gets_one_line(text, pattern, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UserError, match=pattern) as error:
        from_json(file, RunConfig)
    assert "\n" not in str(error.value)


def test_an_unknown_recipe_offers_the_nearest():
    with pytest.raises(UserError, match="Did you mean quickstart"):
        recipe_named("quikstart")


def test_the_json_is_the_whole_config():
    values = json.loads(as_json(recipe_named("default")))
    assert values["assignment"]["tau_end"] == 0.1
    assert values["export"]["format"] == "auto"
