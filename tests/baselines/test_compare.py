"""`dotmoe compare` and `dotmoe convert --method`, on tiny models, exported and verified."""

import copy
import fcntl
import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dotmoe.common.errors import UserError, VerificationError
from dotmoe.measure.report import RunResults
from dotmoe.measure.report.results import active_parameters
from dotmoe.method.config import ExpertsConfig
from dotmoe.method.layout import ALWAYS_ON, ExpertLayout
from dotmoe.models.meta_model import meta_model
from dotmoe.pipeline.compare import with_one_size
from dotmoe.pipeline.convert import convert
from dotmoe.pipeline.points import points_of
from dotmoe.pipeline.rows import Measured, Row, table
from dotmoe.rivals.baselines import METHODS
from dotmoe.rivals.config import BASELINES, BaselineConfig
from dotmoe.rivals.pruning import PRUNING
from dotmoe.run.config import CompareConfig, PruneRunConfig
from dotmoe.run.defaults import splits_for
from dotmoe.text.config import DataConfig
from runs import TINY_CONVERT, TinyRun, loaded

TRAINED = {"lr": 1e-2, "batch_size": 2}
OPTIONS = TINY_CONVERT | {"active_experts": 4}
for trained in (*TRAINED, "steps", "checkpoint_every"):
    del OPTIONS[trained]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "compared"


@pytest.fixture
def compare(tiny_dense, text_file, heldout_file, out, command):
    """Runs `dotmoe compare` with these methods and options."""

    def make(*methods, model="llama", to=out, **options):
        options = OPTIONS | {"data": text_file, "eval_text": heldout_file} | options
        return command("compare", tiny_dense(model), to, methods=methods, **options)

    return make


@pytest.mark.parametrize("name", ["7B", "0.5B"])
def test_all_methods_have_experts_of_one_size_and_run_as_many_neurons(name, tiny_dense):
    """Also where llama.cpp needs larger experts than the default ones, as in a model of 7B."""
    dense = loaded(tiny_dense("qwen2"))
    widths = {"7B": (3_584, 18_944, 28, 28, 4), "0.5B": (896, 4_864, 24, 14, 2)}[name]
    config = copy.deepcopy(dense.config)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads")
    for key, value in zip(names, widths, strict=True):
        setattr(config, key, value)
    config.head_dim, config.layer_types = 64, ["full_attention"] * config.num_hidden_layers
    large = replace(dense, model=meta_model(config), weights="meta")
    given = CompareConfig(
        model="any", out="out", eval_text=("it",), methods=("dot_moe", *BASELINES)
    )
    found = {
        (split.expert_size, split.active_units)
        for point in points_of(with_one_size(given, large))
        for split in splits_for(point.config.method, point.config, large, torch.bfloat16)
    }
    assert len(found) == 1


@pytest.fixture
def rows_of(compare, out):
    """Rows of a comparison by these methods and options."""

    def make(*methods, **options):
        said = compare(*methods, **options)
        assert said.status == 0, said.err
        return summary_in(out)["rows"]

    return make


def summary_in(out):
    return json.loads((out / "compare.json").read_text())


def layout_in(folder):
    return ExpertLayout.load(folder / "3_extract" / "layout.safetensors")


def results_in(folder):
    return json.loads((folder / "6_evaluate" / "results.json").read_text())


def test_convert_exports_what_static_pruning_leaves(tiny_dense, text_file, tmp_path, command):
    """Other methods are rows below."""
    out, options = tmp_path / "run", OPTIONS | {"method": "static_pruning", "data": text_file}
    said = command("convert", tiny_dense("qwen2"), out, **options)
    assert (said.status, "static_pruning" in said.out) == (0, True)
    results = results_in(out)
    assert results["steps"] == 0
    assert results["verification"]["largest_block_error"] < 0.02
    assert not (out / "2_align").exists()


def test_a_comparison_measures_all_on_the_same_text_and_goes_on(rows_of, out, monkeypatch):
    # Blocks are as long as the context, 256; a start at random reads no text.
    options = TRAINED | {"router_steps": 2, "seq_len": 1000, "start": "random"}
    made = rows_of("dot_moe", "random_split", **options)
    (dense, *names), rows = (row["run"] for row in made), {row["run"]: row for row in made}
    assert (dense, rows[dense]["loss_above_dense"]) == ("dense", 0)
    assert names == [
        *("dot_moe-untrained", "dot_moe-router", "dot_moe-trained", "dot_moe-paper"),
        *("random_split-own", "random_split-ridge", "random_split-trained"),
    ]
    table, steps = (out / "compare.md").read_text(), 2 * TRAINED["batch_size"] * 256
    read = [rows[name]["text_tokens"] for name in names]
    assert read == [0, steps, steps, steps, 256, 256, 256 + steps]
    for name in names:
        row, measured = rows[name], results_in(out / name)["moe"]
        assert row["perplexity"] == measured["perplexity"]
        assert f"| {row['perplexity']:.2f} | {measured['bits_per_byte']:.3f} |" in table
        assert row["tokens"] == rows[dense]["tokens"]
        assert row["active_fraction"] == pytest.approx(1 / 3)
        assert 0 < row["seconds"] < 1e4
    held = [load_file(out / name / "0_data" / "heldout.safetensors")["tokens"] for name in names]
    assert all(torch.equal(held[0], other) for other in held)
    fixed = layout_in(out / "random_split-ridge"), layout_in(out / "random_split-trained")
    assert torch.equal(fixed[0].expert_of_neuron_LN, fixed[1].expert_of_neuron_LN)
    assert not torch.equal(fixed[0].router_LED, fixed[1].router_LED)

    # A finished comparison reads what its runs left; neither models nor the age of files matter.
    for name in names:
        os.utime(out / name / "3_extract" / "layout.safetensors", (2e9, 2e9))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert rows_of("dot_moe", "random_split", **options) == made


def test_the_papers_row_has_no_shared_expert_and_no_start_from_data(rows_of, out, tiny_dense):
    """Whatever the others have: read from its layout, its config and its report."""
    rows_of("dot_moe", router_steps=2, shared=1 / 6)
    shared = {
        name: bool((layout_in(out / f"dot_moe-{name}").expert_of_neuron_LN == ALWAYS_ON).any())
        for name in ("untrained", "router", "trained", "paper")
    }
    assert shared == {"untrained": True, "router": True, "trained": True, "paper": False}
    config = json.loads((out / "dot_moe-paper" / "config.json").read_text())
    assert (config["calibrate"]["start"], config["assignment"]["solver"]) == ("random", "sinkhorn")
    split = layout_in(out / "dot_moe-paper").granularity
    assert split.active_fraction == layout_in(out / "dot_moe-trained").granularity.active_fraction
    names = {name: RunResults(out / f"dot_moe-{name}").name for name in ("paper", "trained")}
    assert names == {"paper": "DOT-MoE (paper)", "trained": "dotmoe"}


@pytest.mark.parametrize("changes", [{"shared": 1 / 6}, {"steps": 0}, {"solver": "newton"}])
def test_a_report_calls_papers_only_what_the_papers_recipe_made(
    changes, tiny_dense, text_file, tmp_path
):
    papers = {"start": "random", "solver": "sinkhorn", "surrogate": "softmax", "shared": 0.0}
    options = TINY_CONVERT | {"data": text_file, "steps": 2} | papers
    del options["calibration_tokens"]  # for a start from data
    for name, given in (("paper", options), ("other", options | changes)):
        made = TinyRun("convert", tiny_dense("llama"), tmp_path / name, given).made()
        named = "DOT-MoE (paper)" if name == "paper" else "dotmoe"
        assert RunResults(made.folder).name == named


def test_every_row_is_measured_on_another_text_too(rows_of, compare, tiny_dense, tmp_path, out):
    """Masked, projected or as a checkpoint; oracle: the checkpoints in stock Transformers."""
    other, model = tmp_path / "other.txt", tiny_dense("llama")
    other.write_text("\n".join(f"{i} ships sailed; {i * 5 % 11} came back" for i in range(100)))
    methods = ("cmoe", "slicegpt", "wanda_2_4")
    rows = rows_of(*methods, seeds=[0, 1], other_text=other)
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
    ridge = [row["other_loss"] for row in rows if "cmoe-ridge" in row["run"]]
    assert f"| {math.exp(sum(ridge) / 2):.2f} |" in (out / "compare.md").read_text()
    assert f"Other text, perplexity: {other}." in (out / "compare.md").read_text()
    assert "no.txt" in compare(*methods, to=out / "no", other_text="no.txt").refusal()


@pytest.mark.parametrize("methods", [("random_split", "dot_moe"), ("dot_moe", "random_split")])
def test_rows_in_windows_of_another_length_are_not_subtracted(
    methods, tiny_dense, text_file, heldout_file, out, command
):
    """An export with a shared expert loses the sliding window, and with it context."""
    options = OPTIONS | {"data": text_file, "eval_text": heldout_file, "shared": 1 / 12}
    model = tiny_dense("phi3", sliding_window=32)
    said = command("compare", model, out, methods=methods, **options)
    assert said.status == 0, said.err
    rows = {row["run"]: row for row in summary_in(out)["rows"]}
    ours, rival = rows["dot_moe-untrained"], rows["random_split-ridge"]
    assert (ours["window"], rival["window"], rows["dense"]["window"]) == (32, 256, 256)
    assert summary_in(out)["window"] == 256
    shown = table(summary_in(out))
    cells = {
        row[0] + (row[1] or ""): dict(zip(shown.columns, row, strict=True)) for row in shown.rows
    }
    (cell,) = (each for name, each in cells.items() if name.startswith("dotmoe"))
    assert (cell["nats above dense"], cell["above the best"]) == (None, None)
    assert "dot_moe-untrained is measured in windows of 32" in shown.note
    own = results_in(out / "dot_moe-untrained")
    assert ours["loss_above_dense"] == own["moe"]["loss"] - own["dense"]["loss"]
    assert own["dense"]["window"] == 32


def test_a_row_is_read_back_as_it_was_written():
    """Columns without a value are not written; what only a run knows lies flat beside them."""
    measured = Measured(loss=2.0, tokens=32, window=9, window_losses=[1.0, 3.0])
    row = Row(run="a", value="cmoe", seed=0, measured=measured, details={"num_experts": 8})
    record = json.loads(json.dumps(row.to_record()))
    assert Row.from_record(record) == row
    assert (record["num_experts"], record["loss"], record["seed"]) == (8, 2.0, 0)
    assert {"active_std", "other_loss", "stderr"}.isdisjoint(record)


def test_a_finetuned_row_is_measured_on_the_same_other_text(rows_of, tmp_path, out):
    """Of a text that is longer than --eval-tokens, and than its default where that is not given."""
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"{i} ships sailed; {i * 5 % 11} came back" for i in range(4_000)))
    options = {"other_text": other, "eval_tokens": 512, "finetune_steps": 1}
    rows = rows_of("static_pruning", **options, finetune_recipe="small")
    assert [row["weights"] for row in rows[1:]] == ["frozen", "finetuned"]
    assert len({row["other_ids_sha256"] for row in rows}) == 1
    tuned = results_in(out / rows[-1]["run"])
    assert tuned["moe"]["other"]["tokens"] == tuned["dense"]["other"]["tokens"] < 600


def test_a_loss_on_other_tokens_of_the_other_text_is_not_shown():
    dense = Measured(loss=2.0, window=9, other_loss=1.0, other_ids_sha256="a by 9")
    rows = [Row(value="dense", measured=dense)]
    for name in ("a by 9", "b by 9"):
        rows.append(Row(value=name, measured=replace(dense, other_ids_sha256=name)))
    shown = table({"rows": [row.to_record() for row in rows]})
    place = [*shown.columns].index("other text")
    assert [row[place] for row in shown.rows] == ["2.72", "2.72", None]


def test_rows_that_windows_and_seeds_cannot_tell_apart_are_inconclusive():
    """Beside the best: within two errors of windows, beyond them, within those of its seeds."""
    noise, plain = (0.01, -0.01, 0.02, -0.02), {"window": 9, "tokens": 32}

    def rows(name, above, spread, *seeds):
        return [
            {"value": name, "loss": 2 + above + seed, "loss_above_dense": above + seed}
            | {"window_losses": [2 + above + seed + spread * each for each in noise], **plain}
            for seed in seeds or (0.0,)
        ]

    kinds = [
        ("dense", 0, 0),
        ("a", 0.1, 0),
        ("b", 0.1, 1),
        ("c", 0.2, 1),
        ("d", 0.2, 1, -0.09, 0.1),
    ]
    shown = table({"rows": [row for kind in kinds for row in rows(*kind)]})
    at, seeds = (shown.columns.index(name) for name in ("above the best", "seeds"))
    assert [line[seeds] for line in shown.rows] == [*[None] * 4, "0.110 to 0.300"]
    assert "over windows and seeds;" in shown.note
    of_one_seed = table({"rows": [row for kind in kinds[:4] for row in rows(*kind)]})
    assert "over windows;" in of_one_seed.note
    stderr = np.std(noise, ddof=1) / 2
    assert {line[0]: line[at] for line in shown.rows} == {
        "dense": f"{-0.1:+.3f} ± 0.000",
        "a": None,
        "b": f"+0.000 ± {stderr:.3f} (inconclusive)",
        "c": f"+0.100 ± {stderr:.3f}",
        "d": f"+0.105 ± {math.hypot(stderr, 0.095):.3f} (inconclusive)",
    }


def made(**options):
    """Runs of a comparison."""
    data, eval_text = DataConfig(data=("a.txt",)), options.pop("eval_text", ("b.txt",))
    return points_of(CompareConfig(model="m", out="o", data=data, eval_text=eval_text, **options))


def test_options_reach_the_methods_they_are_for_and_no_run_is_made_twice():
    points = made(
        baseline=BaselineConfig(router_steps=7), experts=ExpertsConfig(shared=0.1), methods=("all",)
    )
    assert len({point.name for point in points}) == len(points)
    names = {"dotmoe", "DOT-MoE (paper)", *METHODS, *PRUNING}
    assert {point.method for point in points} == names
    converted = [point for point in points if not isinstance(point.config, PruneRunConfig)]
    trained = {point.method for point in converted if point.config.baseline.router_steps}
    assert trained == set(METHODS) - {"lte", "static_pruning"}
    for method in ("lte", "static_pruning"):
        assert [p.name for p in points if p.method == method] == [f"{method}-own"]
    steps = [(point.method, point.config.align.steps) for point in points[:4]]
    assert steps == [("dotmoe", 0), ("dotmoe", 7), ("dotmoe", 7), ("DOT-MoE (paper)", 7)]
    paper = points[3].config
    assert (paper.calibrate.start, paper.assignment.solver) == ("random", "sinkhorn")
    having = {point.method for point in converted if point.config.experts.shared}
    rivals = {"static_pruning", "cmoe", "llama_moe_v2_residual"}
    assert having == {"dotmoe"} | rivals


def test_what_does_not_fit_is_left_out_of_all_and_refused_by_name_before_any_run(
    compare, monkeypatch
):
    """Three methods cannot prune OLMo 2; with one expert active none can be shared."""
    begun = []

    def convert(config, progress):
        begun.append(config.method)
        raise UserError("stop here")

    monkeypatch.setattr("dotmoe.pipeline.compare.convert", convert)
    said = compare("dot_moe", "llm_pruner", model="olmo2", active_experts=1)
    assert "norm over all heads at once, so llm_pruner cannot" in said.refusal()
    said = compare("dot_moe", "wanda_2_4", model="smollm3", active_experts=1)
    assert "smollm3 has a decoder that no pruning method knows" in said.refusal()
    assert not begun
    said = compare("all", model="olmo2", active_experts=1)
    assert said.refusal().endswith("stop here")
    assert begun == ["dot_moe", "random_split"]  # a common cause ends the command
    without = {"slicegpt", "llm_pruner", "modegpt", "static_pruning-own"} | {
        f"{method}-{router}"
        for method in ("cmoe", "llama_moe_v2_residual")
        for router in ("own", "ridge")
    }
    assert set(re.findall(r"(\S+) is left out: ", said.err)) == without


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (VerificationError("layer 2 routes otherwise."), "layer 2 routes otherwise."),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError('CUDA out of memory')"),
        pytest.param(MemoryError("9 GB"), "MemoryError('9 GB')", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_fails_says_why_and_the_others_are_made(error, why, compare, out, monkeypatch):
    failing = {"own"}

    def convert_or_fail(config, progress):
        if config.baseline.split_router in failing:
            raise error
        return convert(config, progress)

    def fail(config, progress):
        raise VerificationError("layer 3 computes otherwise.")

    monkeypatch.setattr("dotmoe.pipeline.compare.convert", convert_or_fail)
    monkeypatch.setattr("dotmoe.pipeline.compare.finetune", fail)
    said = compare("contiguous_split", finetune_steps=1)
    assert said.status == 2
    assert "2 runs failed: contiguous_split-own, contiguous_split-ridge-finetuned." in said.err
    assert [row["run"] for row in summary_in(out)["rows"]] == ["dense", "contiguous_split-ridge"]
    assert summary_in(out)["left_out"] == {
        "contiguous_split-own": why,
        "contiguous_split-ridge-finetuned": "layer 3 computes otherwise.",
    }
    for text in ((out / "compare.md").read_text(), said.out):
        assert f"contiguous_split-own failed: {why.rstrip('.')}." in " ".join(text.split())
    if isinstance(error, UserError):
        failing.add("ridge")
        said = compare("contiguous_split", to=out / "none")
        assert (said.status, why in said.err) == (error.exit_code, True)


def test_one_process_at_a_time_writes_a_comparison(compare, out):
    out.mkdir()
    with (out / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "in use by another dotmoe process" in compare("static_pruning").refusal()
    assert not (out / "compare.json").exists()


def test_a_summary_outlives_a_repeat_with_other_options(compare, out):
    assert compare("static_pruning", finetune_steps=1).status == 0
    before = summary_in(out)
    repeated = compare("static_pruning", finetune_steps=2)
    assert "holds a run with other options: steps (1, not 2)" in repeated.refusal()
    assert summary_in(out) == before


def test_every_method_is_frozen_repaired_and_finetuned_alike(rows_of, tiny_dense, out):
    options = {"repair_tokens": 1024, "lte_steps": 2, "repair": []}
    options |= {"finetune_steps": 2, "finetune_recipe": "small"}
    rows = rows_of("dot_moe", "lte", **options)
    runs = ("dot_moe-untrained", "lte-own")  # lte-ridge would be weight_clusters-ridge
    levels = ("frozen", "repaired", "finetuned")
    expected = [(run + "-finetuned" * (to == levels[2]), to) for run in runs for to in levels]
    expected.insert(6, ("lte-own", "frozen"))  # under the method's own router
    assert [(row["run"], row.get("weights")) for row in rows[1:]] == expected
    for row in rows[1:4]:
        measured = results_in(out / row["run"])["frozen" if row["weights"] == "frozen" else "moe"]
        assert row["perplexity"] == measured["perplexity"]
    read = TINY_CONVERT["calibration_tokens"], 1024, 2 * 4 * TINY_CONVERT["seq_len"]
    assert {row["finetune_tokens"] for row in rows if "finetune_tokens" in row} == {read[2]}
    assert [row["text_tokens"] for row in rows[1:4]] == [read[0], sum(read[:2]), sum(read)]
    table = (out / "compare.md").read_text()
    assert all(level in table for level in levels)
    assert f"| {sum(read):,} |" in table

    dense, own = rows[0], rows[7]
    layer = AutoModelForCausalLM.from_pretrained(tiny_dense("llama")).model.layers[0]
    active = results_in(out / "lte-own")["moe_own_router"]["active"]
    assert active["mean"] == pytest.approx(sum(active["layers"]) / 2)
    assert own["active_std"] == active["std"] > 0
    ffns = 2 * sum(p.numel() for p in layer.mlp.parameters())
    off = (1 - active["mean"]) * ffns
    assert own["parameters"] == pytest.approx(dense["parameters"] - off, abs=1)
    reported = RunResults(out / "lte-own").models["under the method's own router"]
    assert active_parameters(reported, {"active": 0}) == own["parameters"]
    assert f"{100 * active['mean']:.0f} % ± " in table
