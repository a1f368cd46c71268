"""`dotmoe compare` and `dotmoe convert --method`, on tiny models, exported and verified."""

import json
import math
import os
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dotmoe.baselines import METHODS, BaselineConfig
from dotmoe.compare import CompareConfig, points_of
from dotmoe.config import PruneRunConfig
from dotmoe.data.sources import DataConfig
from dotmoe.errors import UserError, VerificationError
from dotmoe.granularity import ExpertsConfig
from dotmoe.layout import ExpertLayout
from dotmoe.pipeline import convert
from dotmoe.pruning import PRUNING
from dotmoe.report.plots import is_installed
from runs import TINY_CONVERT, TINY_FINETUNE

OPTIONS = TINY_CONVERT | {"active_experts": 4, "cluster_starts": 1}
del OPTIONS["steps"]


@pytest.fixture
def eval_text(tmp_path):
    path = tmp_path / "held.txt"
    path.write_text("\n".join(f"Line {i}: the hen ate {i * 7 % 13} figs." for i in range(100)))
    return path


def layout_in(folder):
    return ExpertLayout.load(folder / "3_extract" / "layout.safetensors")


def results_in(folder):
    return json.loads((folder / "6_evaluate" / "results.json").read_text())


@pytest.mark.parametrize("method", METHODS)
def test_convert_exports_every_method_verified(method, tiny_dense, text_file, tmp_path, command):
    out = tmp_path / "run"
    said = command("convert", tiny_dense("qwen2"), out, method=method, data=text_file, **OPTIONS)
    assert (said.status, method in said.out) == (0, True)
    results = results_in(out)
    assert results["steps"] == 0
    assert results["verification"]["largest_block_error"] < 0.02
    assert ("moe_own_router" in results) == (METHODS[method].own is not None)
    assert not (out / "2_align").exists()


def test_a_shared_expert_is_aligned_exported_and_finetuned(
    tiny_dense, text_file, tmp_path, command
):
    out, model = tmp_path / "run", tiny_dense("llama")
    options = TINY_CONVERT | {"data": text_file, "active": 0.5, "shared": 0.25}
    refused = command("convert", model, out, **options, format="mixtral").refusal()
    assert "has no place. Formats that can hold it: glm4_moe" in refused
    assert not out.exists()
    assert command("convert", model, out, **options).status == 0
    results, layout = results_in(out), layout_in(out)
    shared = 8 * round(layout.num_neurons / 8 / 4)
    assert results["granularity"]["shared_size"] == layout.shared_size == shared
    assert results["verification"]["largest_block_error"] < 0.02
    state = load_file(out / "2_align" / "state.safetensors")
    assert state["affinity"].shape[2] == state["router"].shape[1] + 1 == layout.num_experts + 1
    moved = [json.loads(line) for line in (out / "2_align/metrics.jsonl").read_text().splitlines()]
    assert max(step["marginal_error"] for step in moved) < 1e-5
    tuned = TINY_FINETUNE | {"train": "everything"}
    assert command("finetune", out, tmp_path / "tuned", **tuned).status == 0
    assert results_in(tmp_path / "tuned")["granularity"] == results["granularity"]


def test_a_comparison_measures_all_on_the_same_text_and_goes_on(
    tiny_dense, text_file, eval_text, tmp_path, command, monkeypatch
):
    out = tmp_path / "compared"
    options = {"methods": ["dot_moe", "random_split"], "router_steps": 2, **OPTIONS}
    options |= {"data": text_file, "eval_text": eval_text}
    said = command("compare", tiny_dense("llama"), out, **options)
    assert (said.status, "compare.json" in said.out) == (0, True)
    summary = json.loads((out / "compare.json").read_text())
    rows = {row["run"]: row for row in summary["rows"]}
    assert rows["dense"]["loss_above_dense"] == 0
    names = [name for name in rows if name != "dense"]
    assert names == [
        *("dot_moe-untrained", "dot_moe-router", "dot_moe-trained"),
        *("random_split-own", "random_split-ridge", "random_split-trained"),
    ]
    for name in names:
        row = rows[name]
        measured = results_in(out / name)["moe"]
        assert row["perplexity"] == measured["perplexity"]
        assert f"{measured['bits_per_byte']:.3f}" in (out / "compare.md").read_text()
        assert row["tokens"] == rows["dense"]["tokens"]
        assert row["active_fraction"] == pytest.approx(1 / 3)
        assert f"{row['perplexity']:.2f}" in (out / "compare.md").read_text()
    held = [load_file(out / name / "0_data" / "heldout.safetensors")["tokens"] for name in names]
    assert all(torch.equal(held[0], other) for other in held)
    fixed = layout_in(out / "random_split-ridge"), layout_in(out / "random_split-trained")
    assert torch.equal(fixed[0].expert_of_neuron_LN, fixed[1].expert_of_neuron_LN)
    assert not torch.equal(fixed[0].router_LED, fixed[1].router_LED)

    # A finished comparison reads what its runs left; neither models nor the age of files matter.
    for name in names:
        os.utime(out / name / "3_extract" / "layout.safetensors", (2e9, 2e9))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert command("compare", tiny_dense("llama"), out, **options).status == 0
    assert json.loads((out / "compare.json").read_text())["rows"] == summary["rows"]
    assert all(0 < rows[name]["seconds"] < 1e4 for name in names)


def test_every_row_is_measured_on_another_text_too(
    tiny_dense, text_file, eval_text, tmp_path, command
):
    """Masked, projected or as a checkpoint; oracle: the checkpoints in stock Transformers."""
    out, other, model = tmp_path / "compared", tmp_path / "other.txt", tiny_dense("llama")
    other.write_text("\n".join(f"{i} ships sailed; {i * 5 % 11} came back" for i in range(100)))
    options = OPTIONS | {
        "methods": ["cmoe", "random_split", "slicegpt", "wanda_2_4"],
        "seeds": [0, 1],
    }
    options |= {"data": text_file, "eval_text": eval_text, "other_text": other}
    assert command("compare", model, out, **options).status == 0
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert all(row["other_loss"] != row["loss"] for row in rows)
    own, of_the_linear_one = rows[2]["other_loss"], rows[1]["other_loss"]
    assert (rows[2]["router"], own == of_the_linear_one) == ("own, not exportable", False)
    checkpoints = {"dense": model, "wanda_2_4": out / "wanda_2_4/4_prune/model"}
    checkpoints |= {
        row["run"]: out / row["run"] / "5_export" for row in rows if "ridge" in row["run"]
    }
    for row in rows:
        if row["run"] not in checkpoints:
            continue
        stock = AutoModelForCausalLM.from_pretrained(checkpoints[row["run"]])
        folder = out / ("wanda_2_4" if row["run"] == "dense" else row["run"])
        tokens_BT = load_file(folder / "0_data" / "other.safetensors")["tokens"].long()
        assert stock.config.vocab_size > tokens_BT.max()
        with torch.no_grad():
            loss = float(stock(tokens_BT, labels=tokens_BT).loss)
        assert row["other_loss"] == pytest.approx(loss, abs=1e-5)
    ridge = [row["other_loss"] for row in rows if "random_split-ridge" in row["run"]]
    shown = (out / "compare.md").read_text()
    assert f"| {math.exp(sum(ridge) / 2):.2f} |" in shown
    assert f"Other text, perplexity: {other}." in shown
    assert (out / "compare.svg").exists() == is_installed()
    assert rf"& {math.exp(sum(ridge) / 2):.2f} &" in (out / "compare.tex").read_text()
    page = (out / "compare.html").read_text()
    assert f">{math.exp(sum(ridge) / 2):.2f}</td>" in page
    assert ("image/svg+xml" in page) == is_installed()
    missing = command("compare", model, out / "no", **options | {"other_text": "no.txt"})
    assert "no.txt" in missing.refusal()


def test_a_comparison_of_trained_splits_shows_the_mean_and_range_of_its_seeds(
    tiny_dense, text_file, eval_text, tmp_path, command
):
    out = tmp_path / "compared"
    options = {"methods": ["random_split"], "router_steps": 2, "seeds": [3, 5], **OPTIONS}
    options |= {"data": text_file, "eval_text": eval_text, "trained_only": ()}
    assert command("compare", tiny_dense("llama"), out, **options).status == 0
    rows = json.loads((out / "compare.json").read_text())["rows"][1:]
    assert [(row["run"], row["seed"], row["steps"]) for row in rows] == [
        (f"random_split-trained-seed{seed}", seed, 2) for seed in (3, 5)
    ]
    split = [layout_in(out / row["run"]).expert_of_neuron_LN for row in rows]
    assert not torch.equal(*split)
    low, high = sorted(row["loss_above_dense"] for row in rows)
    assert low < high
    shown = f"| {(low + high) / 2:.3f} | {low:.3f} to {high:.3f} |"
    assert shown in (out / "compare.md").read_text()


def config_of(eval_text=("b.txt",), **options):
    data = DataConfig(data=("a.txt",))
    return CompareConfig(model="m", out="o", data=data, eval_text=eval_text, **options)


def test_options_reach_the_methods_they_are_for_and_no_run_is_made_twice():
    shared_expert = {"cmoe", "llama_moe_v2_residual"}
    made = points_of(config_of(baseline=BaselineConfig(shared_experts=2, router_steps=7)))
    assert len({point.name for point in made}) == len(made)
    for point in made:
        shared = point.config.baseline.shared_experts
        assert shared == (2 if point.value in shared_expert else None)
    trained = {point.value for point in made if point.config.baseline.router_steps}
    assert trained == set(METHODS)
    steps = [point.config.align.steps for point in made if point.value == "dot_moe"]
    assert steps == [0, 7, 7]


def test_all_is_every_conversion_and_every_method_that_prunes():
    made = points_of(config_of(methods=("all",)))
    pruned = [point.name for point in made if isinstance(point.config, PruneRunConfig)]
    assert pruned == list(PRUNING)
    assert {point.value for point in made} == {"dot_moe", *METHODS, *PRUNING}


def test_what_does_not_fit_is_left_out_of_all_and_refused_by_name_before_any_run(
    tiny_dense, text_file, eval_text, tmp_path, command, monkeypatch
):
    """Three methods cannot prune OLMo 2; with one expert active none can be shared."""
    made = []

    def convert(config, progress):
        made.append(config.method)
        raise UserError("stop here")

    monkeypatch.setattr("dotmoe.compare.convert", convert)
    options = OPTIONS | {"data": text_file, "eval_text": eval_text, "active_experts": 1}
    model, out = tiny_dense("olmo2"), tmp_path / "compared"
    said = command("compare", model, out, methods=["dot_moe", "llm_pruner"], **options)
    assert "norm over all heads at once, so llm_pruner cannot" in said.refusal()
    assert not made
    said = command("compare", model, out, methods="all", **options)
    assert (said.refusal().endswith("stop here"), made) == (True, ["dot_moe"])
    without = {"slicegpt", "llm_pruner", "modegpt"} | {
        f"{method}-{router}"
        for method in ("cmoe", "llama_moe_v2_residual")
        for router in ("own", "ridge")
    }
    assert set(re.findall(r"(\S+) is left out: ", said.err)) == without


def test_a_run_whose_export_fails_its_verification_is_left_out_and_the_others_are_made(
    tiny_dense, text_file, eval_text, tmp_path, command, monkeypatch
):
    def convert_but(failing):
        def convert_or_fail(config, progress):
            if config.baseline.split_router in failing:
                raise VerificationError("layer 2 routes otherwise.")
            return convert(config, progress)

        return convert_or_fail

    out, model = tmp_path / "compared", tiny_dense("llama")
    options = OPTIONS | {"data": text_file, "eval_text": eval_text, "methods": "by_energy"}
    monkeypatch.setattr("dotmoe.compare.convert", convert_but({"own"}))
    said = command("compare", model, out, **options)
    assert (said.status, "by_energy-own is left out: layer 2 routes" in said.err) == (0, True)
    summary = json.loads((out / "compare.json").read_text())
    assert [row["run"] for row in summary["rows"]] == ["dense", "by_energy-ridge"]
    assert summary["left_out"] == {"by_energy-own": "layer 2 routes otherwise."}
    assert "not verified: by_energy-own." in (out / "compare.md").read_text()
    monkeypatch.setattr("dotmoe.compare.convert", convert_but({"own", "ridge"}))
    said = command("compare", model, tmp_path / "none", **options)
    assert (said.status, "layer 2 routes otherwise" in said.err) == (3, True)


def test_a_share_of_the_parameters_is_the_budget_of_all_rows(
    tiny_dense, text_file, eval_text, tmp_path, command
):
    out, model = tmp_path / "compared", tiny_dense("llama")
    options = OPTIONS | {"methods": ["contiguous_split", "shortgpt"], "active_params": 0.75}
    options |= {"data": text_file, "eval_text": eval_text}
    said = command("compare", model, out, **options).refusal()
    assert "active_params is 0.75 and active_experts is 4: two budgets" in said
    assert not out.exists()
    del options["active_experts"]
    assert command("compare", model, out, **options).status == 0
    summary = json.loads((out / "compare.json").read_text())
    dense, own, _, shortgpt = summary["rows"]
    stock = AutoModelForCausalLM.from_pretrained(model)
    total, experts, layers = stock.num_parameters(), 12, len(stock.model.layers)
    expert = 3 * stock.config.hidden_size * 8 * layers
    at_work = [total - expert * (experts - k) for k in range(1, experts + 1)]
    assert dense["parameters"] == total
    assert own["parameters"] == min(at_work, key=lambda active: abs(active - 0.75 * total))
    assert own["over_budget"] == 0
    assert shortgpt["over_budget"] == shortgpt["parameters"] / own["parameters"] - 1
    assert summary["active_params"] == 0.75


def test_a_shared_expert_goes_to_the_methods_that_have_one():
    made = points_of(config_of(experts=ExpertsConfig(shared=0.1)))
    having = {point.value for point in made if point.config.experts.shared}
    assert having == {"dot_moe", "cmoe", "llama_moe_v2_residual"}


def test_a_comparison_without_a_text_of_its_own_or_steps_for_what_is_trained_is_refused():
    with pytest.raises(UserError, match=r"eval_text names no text.*--eval-text"):
        points_of(config_of(eval_text=()))
    with pytest.raises(UserError, match=r"trained_only is set, but router_steps is 0.*cmoe"):
        points_of(config_of(trained_only=True))


def test_every_method_is_frozen_repaired_and_finetuned_alike(
    tiny_dense, text_file, eval_text, tmp_path, command
):
    out, model = tmp_path / "compared", tiny_dense("llama")
    options = {"methods": ["dot_moe", "lte"], "repair_tokens": 1024, "lte_steps": 2, **OPTIONS}
    options |= {"data": text_file, "eval_text": eval_text, "finetune_steps": 2, "repair": []}
    words = ["compare", model, out, "--finetune-recipe", "small"]
    assert command(*words, **options).status == 0
    rows = json.loads((out / "compare.json").read_text())["rows"]
    runs = ("dot_moe-untrained", "lte-own", "lte-ridge")
    levels = ("frozen", "repaired", "finetuned")
    expected = [(run + "-finetuned" * (to == levels[2]), to) for run in runs for to in levels]
    expected.insert(6, ("lte-own", "frozen"))  # under the method's own router
    assert [(row["run"], row.get("weights")) for row in rows[1:]] == expected
    for row in rows[1:4]:
        measured = results_in(out / row["run"])
        key = {"frozen": "frozen"}.get(row["weights"], "moe")
        assert row["perplexity"] == measured[key]["perplexity"]
    assert {row["finetune_tokens"] for row in rows if "finetune_tokens" in row} == {
        2 * 4 * TINY_CONVERT["seq_len"]
    }
    read = TINY_CONVERT["calibration_tokens"], 1024, 2 * 4 * TINY_CONVERT["seq_len"]
    assert [row["text_tokens"] for row in rows[1:4]] == [read[0], sum(read[:2]), sum(read)]
    table = (out / "compare.md").read_text()
    assert all(level in table for level in levels)
    assert f"| {sum(read):,} |" in table

    dense, own = rows[0], rows[7]
    layer = AutoModelForCausalLM.from_pretrained(model).model.layers[0]
    active = results_in(out / "lte-own")["moe_own_router"]["active"]
    assert active["mean"] == pytest.approx(sum(active["layers"]) / 2)
    assert own["active_std"] == active["std"] > 0
    ffns = 2 * sum(p.numel() for p in layer.mlp.parameters())
    off = (1 - active["mean"]) * ffns
    assert own["parameters"] == pytest.approx(dense["parameters"] - off, abs=1)
    assert f"{100 * active['mean']:.0f} % ± " in table
