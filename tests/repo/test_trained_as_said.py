"""What the commands of experiments train is what their pages say: parsed, completed, counted."""

import re
import shlex
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quality
from dotmoe.common.errors import UserError
from dotmoe.run.config import PAPER, PruneRunConfig
from dotmoe.run.defaults import splits_for, with_defaults
from repo.test_commands import config_of, conversions, described, fenced, of_dotmoe

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "Qwen/Qwen2.5-7B": "Qwen2.5-7B",
    "Qwen/Qwen2.5-32B": "Qwen2.5-32B",
    "meta-llama/Llama-2-7b-hf": "LLaMA-2-7B",
    "meta-llama/Meta-Llama-3-8B": "LLaMA-3-8B",
}
"""Names of models on the pages, by those in commands."""
PAPERS_STEPS, PAPERS_BATCH, PAPERS_LENGTH = 3_500, 64, 2_048
FINE_CMOE = "tab_motivation_mse_combined"
"""The page whose CMoE has the experts of all its rows: 128 neurons, 10 active."""
RUNS = {
    "dot_moe": (48, 12, 0, 300),
    "cmoe": (42, 6, 96, 300),
    "llama_moe_v2": (48, 12, 0, 300),
    "random_split": (48, 12, 0, 300),
    "refitted_0": (48, 12, 0, 0),
    "dot_moe_e8": (8, 2, 0, 300),
    "cmoe_e8": (7, 1, 96, 300),
    "dot_moe_e96": (96, 24, 0, 300),
    "dot_moe_half": (48, 24, 0, 300),
    "lte": (48, 12, 0, 0),
    "dot_moe_k19": (48, 19, 0, 300),
    "attention": (2, 1, 0, 150),
    "attention_untrained": (2, 1, 0, 0),
    "attention_random": (2, 1, 0, 150),
}
"""Experts, those that run, always-on neurons and steps of each conversion of runs.toml, as the
pages say: E = 48 of 16 neurons, a quarter active, 300 steps."""


def at_papers_scale():
    """The part of each page that is about the paper's scale, by the experiment's name."""
    found = {}
    for file in sorted(ROOT.glob("experiments/*/README.md")):
        text = file.read_text(encoding="utf-8")
        found[file.parent.name] = text.split("## At the paper's scale")[1].split("\n## ")[0]
    return found


PAGES = at_papers_scale()


def converted(lines):
    """Settled config and splits of every conversion that these commands of dotmoe make."""
    for line in lines:
        if line[0] not in ("convert", "compare"):
            continue
        for config in conversions(config_of(line)):
            if isinstance(config, PruneRunConfig):
                continue
            dense = described(config.model)
            made = with_defaults(config, dense, torch.bfloat16)
            yield made, splits_for(made.method, made, dense, torch.bfloat16)


@pytest.mark.parametrize("name", PAGES)
def test_the_paper_is_repeated_by_its_own_recipe_as_often_as_a_page_says(name):
    said, trained = Counter(), Counter()
    for number, model in re.findall(r"(\d+) alignments?\s+of\s+([\w.-]+\w)", PAGES[name]):
        said[model] += int(number)
    for config, splits in converted(filter(None, map(of_dotmoe, fenced(PAGES[name])))):
        steps = config.align.steps
        trained[NAMES[config.model]] += steps > 0
        if config.method == "dot_moe":
            assert (steps, config.align.batch_size) == (PAPERS_STEPS, PAPERS_BATCH)
            assert config.data.seq_len == PAPERS_LENGTH
            assert (config.calibrate, config.assignment) == (PAPER.calibrate, PAPER.assignment)
            plain = replace(PAPER.align, steps=steps)
            assert replace(config.align, batch_size=plain.batch_size) == plain
            assert not config.repair
            assert all(not each.shared_size for each in splits)
            assert all(not each.first_dense_layers for each in splits)
    for model in trained.keys() & said.keys():
        assert trained[model] == said[model]
    if said and any(trained.elements()):
        assert set(trained) & set(said)
    assert not (said and "dotmoe convert" in PAGES[name]) or any(trained.elements())


@pytest.mark.parametrize("name", PAGES)
def test_rivals_have_the_experts_of_the_papers_rows(name):
    """E8A1S1: of eight experts one always runs, and one of seven is routed."""
    for config, (split, *_) in converted(filter(None, map(of_dotmoe, fenced(PAGES[name])))):
        experts, size = (split.num_experts, split.active_experts), split.expert_size
        if config.method == "cmoe" and name == FINE_CMOE:
            assert (*experts, size, split.shared_size) == (81, 5, 128, 5 * 128)
        elif config.method == "cmoe":
            assert (experts, split.shared_size) == ((7, 1), size)
        elif config.method == "llama_moe_v2":
            assert (experts, split.shared_size) == ((8, 2), 0)


def test_experts_of_the_granularities_are_the_papers():
    lines = filter(None, map(of_dotmoe, fenced(PAGES["fig_expert_granularity"])))
    experts = [(split.num_experts, split.active_experts) for _, (split,) in converted(lines)]
    assert sorted(experts) == [(16, 4), (37, 9), (74, 19), (148, 37), (296, 74)]


def scaled_down():
    """Words of the commands of dotmoe in runs.toml, by the name of the run."""
    for name, entry in tomllib.loads((ROOT / "experiments/runs.toml").read_text()).items():
        line = entry["command"].replace("{seed}", "0").replace("{out}", "OUT")
        program, *words = shlex.split(re.sub(r"\{(\w+)\}", "RUN", line))
        if program == "dotmoe":
            yield name, words


def test_runs_train_what_the_pages_say():
    found = {}
    for name, words in scaled_down():
        made = [*converted([words])]
        if words[0] == "compare":  # rows of which nothing is trained
            assert all(config.align.steps == 0 for config, _ in made)
        for config, (split, *_) in made if words[0] == "convert" else ():
            sizes = split.num_experts, split.active_experts, split.shared_size
            found[name] = (*sizes, config.align.steps)
    assert found == RUNS


def test_rows_of_the_quality_of_parts_differ_and_are_what_they_are_called(tmp_path):
    settings = quality.Settings(out=tmp_path)
    rows = quality.conversions(settings, ())
    dense, made = described("embedded"), {}
    for name, config in rows.items():
        config = with_defaults(config, dense, torch.bfloat16)
        (split,) = splits_for(config.method, config, dense, torch.bfloat16)
        assert (split.shared_size > 0) == ("shared expert" in name), name
        assert split.active_fraction == 0.25
        assert config.repair == ("repaired" in name)
        made[name] = config
    assert len({repr(config) for config in made.values()}) == len(made)
    paper = made["paper's recipe"]
    assert (paper.calibrate, paper.assignment) == (PAPER.calibrate, PAPER.assignment)
    assert (paper.align.steps, paper.align.surrogate) == (300, PAPER.align.surrogate)
    assert paper.experts.shared == 0
    with pytest.raises(UserError, match="'start' and 'start, shared expert' would be the same"):
        quality.conversions(replace(settings, shared=0.0), ())
