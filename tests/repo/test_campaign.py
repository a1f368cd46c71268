"""The campaign: its rows, its plan, a stop in the middle, and all of it on a tiny model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import campaign
import campaign_measures
import campaign_plan
import dotmoe
from campaign_plan import Rates
from campaign_rows import MODELS, TINY, Plan, rows_of, with_sources
from document_tables import campaign_table
from document_tables.cells import tabled
from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json
from dotmoe.measure.evaluate.difference import IncomparableError
from dotmoe.measure.inspection.accelerators import Accelerator
from dotmoe.method.layout import DROPPED, load_layouts
from dotmoe.method.state import load_states
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import load_dense
from dotmoe.text import answering, writing
from idle_experts import expert_energies, without_idlest
from runs import put_into

CHATML = (
    "{% for m in messages %}<u>{{ m['role'] }}:{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant:{% endif %}"
)
WIDTHS = {"width": 576, "ffn": 1_536, "data": ("prompts", "self")}
EMBEDDED = Path(dotmoe.__file__).parent / "models/embedded"
GENERATED = ("gsm8k", "humaneval")
CHANGES = {"data": ("self",), "dtype": "bfloat16", "amounts": replace(TINY, calibration_tokens=256)}
"""Of a plan, each of which makes other rows."""
QUICK = ("cost", "size", "answers", "python")


@pytest.fixture
def subject(tiny_dense, tmp_path, monkeypatch):
    """Settings of a trial on a tiny chat model, whose answers are short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    short = writing.Sampling(new_tokens=16)
    for name in ("ANSWERS", "TURNS", "FREE"):
        monkeypatch.setattr(writing, name, short)
    monkeypatch.setattr("dotmoe.measure.evaluate.own_answers.ANSWERS", short)
    monkeypatch.setattr(answering, "AT_ONCE", 8)
    monkeypatch.setattr(campaign, "probed", lambda *which: Rates(read=100.0, written=10.0))
    here = Accelerator(name="this CPU", flops_per_s=1e10, bytes_per_s=1e9, on_cpu=True)
    here = replace(here, memory_bytes=10**10)
    monkeypatch.setattr(campaign_plan, "measured_here", lambda *which: here)
    folder = shutil.copytree(tiny_dense("qwen2"), tmp_path / "speaker")
    put_into(folder / "tokenizer_config.json", chat_template=CHATML)
    return campaign.Settings(name="embedded", model=str(folder), tiny=True, measures=QUICK)


def plans():
    return {
        name: Plan(model=model, amounts=model.amounts, **WIDTHS) for name, model in MODELS.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_each_row_is_another_and_comes_after_what_it_is_made_of(name):
    rows = rows_of(plans()[name])
    names = [row.name for row in rows]
    assert len({*names}) == len(names)
    made = [json.dumps([row.by, row.of, row.options], sort_keys=True) for row in rows]
    assert len({*made}) == len(made)
    for place, row in enumerate(rows):
        assert row.of is None or row.of in names[:place]
        assert row.beside is None or row.beside in names


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_the_paper_have_its_start_and_no_shared_expert(name):
    for row in rows_of(plans()[name]):
        if not row.name.startswith("paper"):
            continue
        if row.by == "finetune":
            assert row.options["recipe"] == "paper"
            continue
        options = {key: value for key, value in row.given.items() if key != "recipe"}
        run = dotmoe.recipe("paper", model="embedded", out="run", **options)
        assert run.calibrate.start == "random"
        assert (run.experts.shared, run.experts.first_dense_layers) == (0, 0)
        assert (run.assignment.solver, run.align.surrogate) == ("sinkhorn", "softmax")
        assert run.align.steps > 0
        assert not run.repair


def test_the_papers_rows_read_as_many_tokens_as_ours():
    plan = plans()["smollm2"]
    ours = 40 * 576 + 40 * 1_536 + 240 * 4 * 512
    aligned, finetuned = plan.paper_steps
    assert (aligned + finetuned) * 8 * 512 == pytest.approx(ours, rel=0.01)
    assert aligned / (aligned + finetuned) == pytest.approx(0.277, abs=0.01)  # 458 of 1,658 M


def test_layouts_of_rows_called_paper_are_those_of_the_paper(subject):
    """From the files of the runs: no shared expert, no dense layer, affinities at random."""
    made = campaign.Campaign(replace(subject, rows=("paper-50", "repaired-50"), measures=("cost",)))
    made.run()
    (paper,) = load_layouts(made.folder / "paper-50/3_extract")
    (ours,) = load_layouts(made.folder / "repaired-50/3_extract")
    assert (paper.granularity.shared_size, paper.moe_layers.start) == (0, 0)
    assert ours.granularity.shared_size > 0
    values = {}
    for name in ("paper-50", "repaired-50"):
        (state,) = load_states(made.folder / name / "1_calibrate", torch.device("cpu"))
        values[name] = state.affinity_LNE.unique()
    assert len(values["repaired-50"]) <= 3  # from data it is one-hot
    assert len(values["paper-50"]) > 100


def test_the_plan_has_each_row_with_each_measure_that_can_be_made(subject, monkeypatch):
    made = campaign.Campaign(replace(subject, measures=()))
    lines, expected = made.expected()
    assert [line.name for line in lines] == [row.name for row in made.all_rows if row.by_default]
    possible = {"cost", "size", "answers", "python", "tasks", "gsm8k", "humaneval"}
    assert all(line.measures.keys() == possible for line in lines)
    fitted = [row for row in made.all_rows if row.by == "convert"]
    assert 0 < expected.answers(fitted) < expected.answers(made.all_rows)
    left = expected.answers(made.all_rows, fitted)
    assert left == pytest.approx(expected.answers(made.all_rows) - expected.answers(fitted))
    assert expected.answers(made.all_rows, made.all_rows) == 0
    assert all(line.make > 0 for line in lines if line.name != "dense")
    tasks = {line.measures["tasks"] for line in lines}
    assert tasks == {2 * 1_275 / 100.0 / 3_600}
    said = " ".join(made.said_of_missing())
    assert "wiki is left out: give --wiki FILE" in said
    assert "vllm is left out" in said


@pytest.mark.parametrize("name", MODELS)
def test_own_answers_are_counted_for_any_row_alone(name):
    """Also for rows that train nothing, and whose batches are those of no training."""
    counted = {row.name: campaign_plan._own_tokens(row) for row in rows_of(plans()[name])}
    assert counted["refitted-50"] < counted["repaired-50"] == counted["static-repaired-50"]
    assert counted["sparsegpt-2-4"] == counted["repaired-50"]
    assert counted["paper-50"] > 0 == counted["finetuned-50"]


def test_rows_are_named_by_patterns_and_bring_what_they_are_made_of(subject):
    made = campaign.Campaign(replace(subject, rows=("*finetuned-50",)))
    names = [row.name for row in made.rows]
    wanted = {f"{of}-50" for of in ("finetuned", "static-finetuned", "paper-finetuned")}
    assert {*names} == wanted | {"repaired-50", "static-repaired-50", "paper-50"}
    assert made.rows == with_sources(made.all_rows, sorted(wanted))
    with pytest.raises(UserError, match=r"--rows nonsense is no row. Rows: dense"):
        campaign.Campaign(replace(subject, rows=("nonsense",)))
    with pytest.raises(UserError, match=r"there is no model smolm2"):
        campaign.Campaign(replace(subject, name="smolm2"))
    with pytest.raises(UserError, match=r"--model PATH"):
        campaign.Campaign(replace(subject, name="gemma3_270m", model=None))


def test_a_stopped_campaign_goes_on_and_makes_nothing_twice(subject, monkeypatch):
    subject = replace(subject, rows=("frozen-50", "cmoe-50"))
    plain, asked = campaign_measures.MEASURES["python"], []

    def stopping(it):
        asked.append(it.row.name)
        if it.row.name == "cmoe-50":
            raise KeyboardInterrupt
        return plain.make(it)

    def counting(it):
        asked.append(it.row.name)
        return plain.make(it)

    monkeypatch.setitem(campaign_measures.MEASURES, "python", replace(plain, make=stopping))
    first = campaign.Campaign(subject)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert not first.left_out
    assert asked == ["frozen-50", "cmoe-50"]
    run = (first.folder / "frozen-50/manifest.json").read_bytes()
    asked.clear()

    monkeypatch.setitem(campaign_measures.MEASURES, "python", replace(plain, make=counting))
    second = campaign.Campaign(subject)
    lines, _ = second.expected()
    assert {line.name: (line.make, [*line.measures]) for line in lines} == {
        "frozen-50": (0.0, []),
        "cmoe-50": (0.0, ["python"]),
    }
    second.run()
    assert asked == ["cmoe-50"]
    assert (first.folder / "frozen-50/manifest.json").read_bytes() == run
    asked.clear()
    longer = replace(subject, measures=("python",))
    third = campaign.Campaign(longer)
    third.amounts = replace(third.amounts, windows=3)
    third.run()
    assert asked == ["frozen-50", "cmoe-50"]


def test_rows_of_other_options_and_measures_of_other_text_are_not_taken_for_todays(
    subject, tmp_path
):
    text = tmp_path / "wiki.txt"
    text.write_text("A text of some words, and of some more. " * 60)
    subject = replace(subject, rows=("frozen-50",), measures=("wiki",), wiki=str(text))
    first = campaign.Campaign(subject)
    first.run()
    row, wiki = first.by_name["frozen-50"], campaign_measures.MEASURES["wiki"]
    assert first.is_made(row)
    assert first.found(row, wiki)

    changed = {name: replace(first.plan, **{name: value}) for name, value in CHANGES.items()}
    for name, plan in changed.items():
        other = campaign.Campaign(subject)
        other.all_rows = rows_of(plan)
        other.__dict__.pop("by_name", None)
        assert not other.is_made(other.by_name["frozen-50"]), name
    failed = campaign.Campaign(subject)
    failed.left_out["frozen-50", ""] = "it failed"
    assert not failed.is_made(row)

    text.write_text("Another text of as many words under the name. " * 60)
    assert campaign.Campaign(subject).found(row, wiki) is None


def test_what_is_made_of_a_run_is_made_again_with_it(subject):
    subject = replace(subject, rows=("without-idle-50",), measures=("size",))
    first = campaign.Campaign(subject)
    first.run()
    row = first.by_name["without-idle-50"]
    assert first.is_made(row)
    shutil.rmtree(first.folder / "repaired-50")
    assert not campaign.Campaign(subject).is_made(row)
    shutil.rmtree(first.folder / row.name)
    (first.folder / row.name).mkdir()
    second = campaign.Campaign(subject)
    second.run()
    assert second.found(row, campaign_measures.MEASURES["size"])


def test_scores_that_were_not_asked_alike_have_no_difference():
    score = {"task": "piqa", "is_main": True, "value": 0.5, "stderr": 0.1, "metric": "acc"}
    one, other = (
        {"tasks": {"piqa": {"scores": [score], "identity": {"shots": shots}}}} for shots in (0, 5)
    )
    assert campaign_measures.tasks_apart(one, one)
    with pytest.raises(IncomparableError, match="shots"):
        campaign_measures.tasks_apart(one, other)


def test_a_base_model_is_asked_for_no_held_out_answers():
    plan = Plan(model=MODELS["gemma3_270m"], amounts=TINY, is_chat=False, **WIDTHS)
    assert not any("heldout_answers" in row.options for row in rows_of(plan))


def test_what_fails_is_left_out_with_the_reason_and_the_others_are_made(subject, monkeypatch):
    def failing(*arguments, **options):
        raise UserError("the disk speaks no Greek")

    monkeypatch.setattr(dotmoe, "convert", failing)
    made = campaign.Campaign(replace(subject, rows=("dense", "finetuned-50"), measures=("size",)))
    made.run()
    _, expected = made.expected()
    rows = {row["name"]: row for row in made.collected(expected)["rows"]}
    assert rows["dense"]["measures"]["size"]["bytes"] > 0
    assert rows["repaired-50"]["why_not_made"] == "the disk speaks no Greek"
    assert rows["finetuned-50"]["why_not_made"] == "repaired-50, of which it is made, is left out"
    assert rows["paper-50"]["why_not_made"] == "not asked for"
    assert rows["paper-50"]["expected_hours"] > 0


@pytest.mark.parametrize("commit", ["abc+changes", None])
def test_a_tree_without_a_commit_is_refused(commit, subject, monkeypatch):
    monkeypatch.setattr(campaign, "commit", lambda: commit)
    whole = replace(subject, tiny=False)
    with pytest.raises(UserError, match=r"--allow-dirty"):
        campaign.require_clean_commit(whole)
    for allowed in (subject, replace(whole, plan=True), replace(whole, allow_dirty=True)):
        campaign.require_clean_commit(allowed)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_trial(name, subject):
    """`--tiny`, for one whose split names the size of its experts and for one whose split does
    not."""
    tried = campaign.Campaign(replace(subject, name=name))
    assert "repaired-50" in [row.name for row in tried.all_rows]


def test_the_idlest_experts_are_those_of_least_energy(tiny_dense, layout_of):
    """Energy by its definition: each token's terms, over the tokens that run the expert."""
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(dtype="float32"))
    layout = layout_of(dense, 6, active_experts=2, shared_size=24, dense_layers=1)
    tokens = torch.randint(2, 250, (2, 24))
    energy_LE = expert_energies(dense, layout, tokens)
    mlp = dense.model.model.layers[1].mlp
    seen = []
    handle = mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        dense.model(input_ids=tokens)  # the first layer is dense, so the second reads the same
        handle.remove()
        x_TD = seen[0].flatten(0, 1)
        hidden_TN = torch.nn.functional.silu(mlp.gate_proj(x_TD)) * mlp.up_proj(x_TD)
        terms_TN = hidden_TN.square() * mlp.down_proj.weight.square().sum(0)
        chosen_TK = (x_TD @ layout.router_LED[1].T).topk(2).indices
    expected_E = torch.zeros(6)
    for token, chosen_K in enumerate(chosen_TK.tolist()):
        for expert in chosen_K:
            neurons = layout.expert_of_neuron_LN[1] == expert
            expected_E[expert] += terms_TN[token, neurons].sum()
    torch.testing.assert_close(energy_LE[0], expected_E, rtol=1e-4, atol=1e-9)
    smaller = without_idlest(layout, energy_LE, 2)
    idle = expected_E.argsort()[:2].tolist()
    gone_N = sum((layout.expert_of_neuron_LN[1] == expert) for expert in idle).bool()
    assert torch.equal(smaller.expert_of_neuron_LN[1] == DROPPED, gone_N)
    assert torch.equal(smaller.shared_neurons(1), layout.shared_neurons(1))
    kept = [expert for expert in range(6) if expert not in idle]
    assert torch.equal(smaller.router_LED[1], layout.router_LED[1, kept])
    for new, old in enumerate(kept):
        mine, before = smaller.neurons_of_expert(1)[new], layout.neurons_of_expert(1)[old]
        assert torch.equal(mine, before)


@pytest.mark.slow
def test_every_row_and_measure_is_made_and_shown(subject, shared_data, text_file, tmp_path):
    """All that this machine can make, from one command to the tables of the documents."""
    texts = {"wiki": str(text_file), "books": str(text_file)}
    # The tiny models' tokenizer of bytes does not survive a GGUF file.
    folder = shutil.copytree(EMBEDDED, tmp_path / "embedded")
    put_into(folder / "tokenizer_config.json", chat_template=CHATML)
    subject = replace(subject, model=str(folder))
    measures = tuple(name for name in campaign_measures.MEASURES if name not in GENERATED)
    given = {"task_data": str(shared_data / "benchmarks"), **texts}
    made = campaign.Campaign(replace(subject, measures=measures, **given))
    made.run()
    assert not made.left_out
    generating = campaign.Campaign(replace(subject, measures=GENERATED, rows=("dense",), **given))
    generating.run()
    ((row, measure),) = generating.left_out  # answers to HumanEval are longer than the context
    assert (row, measure) == ("dense", "humaneval")
    assert "(512)" in generating.left_out[row, measure]
    _, expected = made.expected()
    record = made.collected(expected)
    rows = {row["name"]: row for row in record["rows"]}
    assert all(row["is_made"] for row in rows.values())
    for row in rows.values():
        assert {*row["not_measured"]} <= {"llama_cpp", "vllm", *GENERATED}, row["name"]
        assert json.dumps(row)
    same = {f"{kind}-50": rows[f"{kind}-50"] for kind in ("static-repaired", "cmoe-repaired")}
    for row in same.values():
        assert row["above_beside"]["answers"]["kl_alike"][1] > 0
    assert rows["gguf-q8_0"]["measures"]["answers"]["others"]["kl"] < 0.01
    tokens = {name: row["measures"]["cost"]["tokens"] for name, row in rows.items()}
    assert tokens["finetuned-50"] == tokens["repaired-50"] + 2 * 2 * 64
    assert tokens["finetuned-50"] == tokens["static-finetuned-50"]
    assert tokens["dense"] == 0
    shown = campaign_table.tables(record, tabled)
    for words in ("SparseGPT 2:4", "DOT-MoE (paper), finetuned", "KL, other prompts", "GSM8K"):
        assert words in shown
    assert read_json(made.file(made.by_name["dense"], "size"))["values"]["bytes"] > 0


def test_results_so_far_are_written_after_each_row(subject):
    made = campaign.Campaign(replace(subject, measures=("size",), rows=("dense", "frozen-50")))
    seen = []
    made.run(on_row=lambda: seen.append(sum(map(made.is_made, made.all_rows))))
    assert seen == [1, 2]


def test_results_name_no_paths_and_no_single_questions():
    task = {"scores": [{"value": 0.5, "per_question": [1, 0]}], "identity": {"model": "/home/a"}}
    values = {
        "text": ["/home/a/wiki.txt"],
        "name": "/home/a/run",
        "loss": 2.0,
        "tasks": {"x": task},
    }
    assert campaign._short(values) == {
        "text": ["wiki.txt"],
        "loss": 2.0,
        "tasks": {"x": {"scores": [{"value": 0.5}]}},
    }


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        ("refitted static-refitted repaired", "refitted static-refitted"),
        ("refitted static-refitted repaired static-repaired", "repaired static-repaired"),
        ("repaired finetuned", "repaired"),
    ],
)
def test_the_front_page_shows_rows_that_are_trained_alike(made, shown):
    """Else ours, trained for longer, would stand beside a rival that is not."""
    answers = {kind: {"kl": 0.1, "kl_stderr": 0.01, "top1": 0.9} for kind in ("alike", "others")}
    row = {"share": 0.5, "is_made": True, "measures": {"answers": answers}}
    rows = [row | {"name": f"{name}-50", "what": name} for name in made.split()]
    record = {"model": {"title": "A model"}, "rows": rows}
    columns = {}
    campaign_table.front_page(
        {"file": record},
        lambda rows, cells, words: columns.update(
            {"method": [cells["method"](each) for each in rows]}
        ),
    )
    assert columns["method"] == shown.split()
