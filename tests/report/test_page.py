"""The page says what the result files say, loads nothing, and names what is missing."""

import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pages import HOSTILE, ROOT, Page, read_page
from rich.console import Console

from dotmoe.cli import COMMANDS, run
from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json
from dotmoe.common.tables import in_bytes
from dotmoe.measure.report import RunResults
from dotmoe.measure.report.page import html, html_report, markdown, summary
from dotmoe.measure.report.plots import NO_PLOT, WIDTH, quality_figure
from dotmoe.models.identity import fingerprint
from dotmoe.run.finished import FinishedRun
from runs import put_into, weights_of

PHONE_PX = 350
"""Width of a plot on a phone."""
OPTIONS = json.loads((ROOT / "tests/contract/golden/options.json").read_text())


@pytest.fixture
def bare(finished, tmp_path):
    """A run of which nothing was measured after its end; may be changed."""
    return finished.copied_to(tmp_path / "bare").folder


@pytest.fixture
def found(measured):
    """Results that may be changed."""
    return RunResults(measured)


@pytest.fixture(scope="module")
def page(measured):
    return read_page(measured / "7_report" / "report.html")


def test_the_page_is_whole_html_that_loads_nothing(measured, page):
    assert page.tags.count("h1") == 1
    assert page.tags.count("section") > 10
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    for attribute in ("src", "href", "srcset", "data"):
        assert all(value[:1] == "#" or value[:5] == "data:" for value in page.values_of(attribute))
    assert not re.search(r"@import|url\(", (measured / "7_report" / "report.html").read_text())
    ids = page.values_of("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in page.values_of("href")} <= set(ids)
    metas = [attrs for tag, attrs in page.elements if tag == "meta"]
    content = {meta.get("name") or meta.get("http-equiv"): meta.get("content") for meta in metas}
    assert content["viewport"] == "width=device-width, initial-scale=1"
    assert content["Content-Security-Policy"].startswith("default-src 'none'")
    for index, tag in enumerate(page.tags):
        if tag == "table":
            assert page.elements[index - 1][1]["class"] == "scrolls"


def test_figures_are_those_of_the_result_files(measured, found, page):
    text, held = page.text, sum(w.nbytes for w in weights_of(measured / "5_export").values())
    dense, moe = found.results["dense"], found.results["moe"]
    for side in (dense, moe):
        assert f"{side['perplexity']:.3f} {side['loss']:.4f}" in text
    assert f"{moe['loss'] - dense['loss']:+.4f}" in text
    for count in found.results["parameters"].values():
        assert f"{count:,}" in text
    for point in found.files["curve"]["points"]:
        assert f"{point['active_parameters']:,} " in text
        assert f" {point['perplexity']:.3f} " in text
    for point in found.files["bench"]["points"]:
        low, high = point["speed_ratio_quartiles"]
        assert re.search(rf"{point['speed_ratio']:.2f} {low:.2f}( to |-){high:.2f}", text)
    assert f"KL {found.files['fidelity']['kl']:.4f} nats" in text
    assert "average of tasks (boolq acc" in text
    assert f"The files hold {in_bytes(held)}" in text
    assert f"Format {found.export.format}: {found.export.exactness}" in text


def test_what_an_export_notes_stands_under_serve_with_code_as_code(found):
    note = 'Keep routers as they are (llm-compressor: `ignore=["lm_head"]`).'
    found.export = replace(found.export, notes=[note])
    page = html(found)
    serve = page.split("Serve</h2>")[1].split("</section>")[0]
    assert "(llm-compressor: <code>ignore=[&#34;lm_head&#34;]</code>)" in serve
    assert "`" not in Page(page).text
    assert note in markdown(found).split("## Serve")[1].split("\n## ")[0]


def test_rows_are_called_by_what_was_done_to_the_weights(finetuned):
    assert list(RunResults(finetuned.folder).models) == ["dense", "frozen", "finetuned"]


@pytest.mark.parametrize(("epochs", "name"), [(0, "refitted"), (2, "repaired")])
def test_a_repair_without_training_is_called_a_refit(epochs, name, finished, tmp_path):
    folder = finished.copied_to(tmp_path / "run").folder
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"] |= {"repair": True, "repairing": {"repair_epochs": epochs}}
    manifest["stages"]["repair"] = manifest["stages"]["extract"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert RunResults(folder).name == name


def test_a_table_that_is_cut_on_a_phone_names_the_column_of_each_cell(page):
    tables, heads = [], []
    for tag, attrs in page.elements:
        if tag == "table":
            tables.append((attrs.get("class"), []))
        elif tag == "td":
            tables[-1][1].append(attrs["data-column"])
    heads = [found for found in tables if found[0] == "wide"]
    assert 0 < len(heads) < len(tables)
    assert tables[0][0] is None  # the first screen
    assert set(tables[0][1]) == {"perplexity", "times dense", "parameters for a token"}


@pytest.mark.parametrize(
    ("hardware", "shown"),
    [
        ("CPU, 2 cores, x86_64", False),
        ("1 x NVIDIA H100 80GB HBM3", False),
        ("8 x NVIDIA B200", True),
        ("NVIDIA GeForce RTX 5090", True),
        ("NVIDIA RTX PRO 6000 Blackwell", True),
    ],
)
def test_notes_of_a_gpu_stand_on_the_page_only_where_it_was(found, hardware, shown):
    found.results["provenance"]["hardware"] = hardware
    text = markdown(found)
    assert ("Blackwell GPUs can hang" in text) == shown
    assert ("of Blackwell GPUs, which the run did not have" in text) != shown
    assert sum("Blackwell" in note for note in found.export.notes) > 1


def test_a_page_is_titled_by_the_name_of_its_model_and_has_no_empty_section(found, finished):
    assert f"# {Path(finished.source).name}" in markdown(found).splitlines()[0]
    found.steps["align"] = []
    assert "## Alignment" not in markdown(found)


def test_hostile_text_stays_text_and_nothing_is_praised_that_was_not_tested(found):
    found.files["analysis/expert_utilisation"]["values"]["warnings"] = []
    found.files["generation"]["model"]["prompts"][0] = HOSTILE
    found.files["perplexity"]["against"] |= {"name": "another/model", "fingerprint": "0" * 64}
    found.config["note"] = HOSTILE
    source = html(found)
    page = Page(source)
    assert " ".join(HOSTILE.split()) in page.text
    assert not any("http://evil" in value for value in page.values_of("src"))
    assert "script" not in page.tags
    assert "no layer's load is uneven" in page.text
    said = source.split("Perplexity on other text</h2>")[1].split("</section>")[0]
    assert "another/model" in said
    assert ">dense<" not in said
    found.files["perplexity"]["model"]["name"] = found.dense_model  # named first
    assert "| dense | " in markdown(found).split("## Perplexity on other text")[1].split("##")[0]


@pytest.mark.parametrize("kind", ["finished", "finetuned", "measured"])
def test_every_proposed_command_can_be_given(kind, request):
    made = request.getfixturevalue(kind)
    folder = made if kind == "measured" else made.folder
    page = read_page(html_report(folder))
    assert page.commands
    for proposed in page.commands:
        program, name, *words = shlex.split(proposed)
        assert (program, name in COMMANDS) == ("dotmoe", True)
        for option in (word for word in words if word.startswith("--")):
            assert option in OPTIONS[name] or option == "--config", proposed
        written = ("-finetuned", "/bench.json")
        paths = [word for word in words if "/" in word and not word.endswith(written)]
        assert all(Path(path).exists() for path in paths), proposed
    asked = " ".join(page.commands)
    missing = {"--tasks", "--curve", "--fidelity", "--generate", "bench", "analyse"}
    assert {word for word in missing if word in asked} == (set() if kind == "measured" else missing)
    assert RunResults(folder).dense_model in asked


@pytest.mark.parametrize("kind", ["finished", "finetuned"])
def test_a_run_ends_with_what_was_lost_and_the_commands_that_come_next(kind, request):
    folder = request.getfixturevalue(kind).folder
    console = Console(width=1000, file=io.StringIO())
    console.print(summary(folder))
    said, results = console.file.getvalue(), RunResults(folder).results
    times = results["moe"]["perplexity"] / results["dense"]["perplexity"]
    assert f"Perplexity is {times:.2f} times the dense model's" in said
    counts = results["parameters"]
    assert f"({100 * counts['active'] / counts['dense']:.0f} %) work on a token" in said
    lines = [line.split(maxsplit=1) for line in said.splitlines() if line.strip()]
    next_ones = {name: shlex.split(rest) for name, rest in lines[-3 - (kind == "finished") :]}
    assert next_ones.pop("report")[0] == str(folder / "7_report" / "report.html")
    assert set(next_ones) == {"generate", "serve", *["recover"] * (kind == "finished")}
    assert run(next_ones["generate"][1:]) == 0
    assert next_ones["serve"][:3] == ["vllm", "serve", str(folder / "5_export")]


def test_the_picture_shows_every_model_at_its_numbers_with_text_that_can_be_read(measured):
    run = RunResults(measured)  # text is in it and legible, axes fill it
    counts, curve = run.results["parameters"], run.files["curve"]
    figure = quality_figure(run.models, counts, curve)
    (axes,) = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    active = 100 * counts["active"] / counts["dense"]
    for name, model in run.models.items():
        share = 100.0 if name == "dense" else active
        assert drawn.pop(name) == [[share, model["perplexity"]]]
    (at_other_k,) = drawn.values()
    assert len(at_other_k) == len(curve["points"])
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert max(-box.x0, -box.y0, box.x1 - width, box.y1 - height) <= 0
    assert axes.get_position().width >= 0.5
    for text in figure.findobj(lambda artist: hasattr(artist, "get_fontsize")):
        assert text.get_fontsize() / 72 / WIDTH * PHONE_PX >= 7


def test_a_run_of_heads_is_proposed_what_it_can_have(found):
    """It cannot be trained further, and no benchmark has two k."""
    found.splits = (*found.splits, replace(found.splits[0], target="attention"))
    del found.files["bench"], found.files["curve"]
    proposed = markdown(found).split("## Not measured yet")[1]
    assert "--curve" in proposed
    assert "dotmoe finetune" not in proposed
    assert "dotmoe bench" not in proposed


def test_every_result_names_the_model_that_it_measured(measured, finished):
    known = {fingerprint(measured / "5_export"), fingerprint(finished.source)}
    known.add(FinishedRun(measured).fingerprints["experts"])
    names = set()
    for path in measured.joinpath("6_evaluate").rglob("*.json"):
        content = read_json(path)
        name = path.relative_to(measured / "6_evaluate").with_suffix("").as_posix()
        found = list(values_at("fingerprint", content))
        assert found, name
        assert set(found) <= known, name
        names.add(name.partition("/")[0])
    assert names == {"results", "perplexity", "curve", "fidelity", "generation", "analysis"} | {
        *("bench", "tasks", "against")
    }


def test_a_model_is_called_by_what_it_is_wherever_it_lies(measured, finished):
    """Its fingerprint says so: a folder has more names than one."""
    dense = {"name": "./elsewhere", "fingerprint": fingerprint(finished.source)}
    ours = {"name": "another/run", "fingerprint": fingerprint(measured / "5_export")}
    results = RunResults(measured)
    for pair in ({"model": ours, "against": dense}, {"model": dense, "against": ours}):
        named = results.named(pair)
        called = {"./elsewhere": "dense", "another/run": results.name}
        for side, model in pair.items():
            assert named[side]["name"] == called[model["name"]]
    assert results.named({"model": dense})["model"]["name"] == "dense"


def values_at(key, content):
    """Strings at a key in nested JSON, or in the values of an object at it."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if name == key:
            yield from value.values() if isinstance(value, dict) else [value]
        elif isinstance(value, dict):
            yield from values_at(key, value)


def test_every_module_that_writes_what_it_measured_takes_fingerprints_from_one_place():
    """The quickstart puts together what others measured."""
    package = ROOT / "src" / "dotmoe"
    writers = {
        path.relative_to(package).as_posix(): "dotmoe.models.identity import FINGERPRINT" in text
        for path in package.rglob("*.py")
        if '"origin": "measured"' in (text := path.read_text())
    }
    assert {name for name, does in writers.items() if not does} == {"cli/quickstart.py"}
    makers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "def fingerprint(" in path.read_text()
    ]
    assert makers == ["models/identity.py"]


def test_closeness_and_speed_are_those_to_the_dense_model_or_left_out(measured, tmp_path):
    made = Path(shutil.copytree(measured, tmp_path / "run"))
    asked = made / "6_evaluate"
    other = {"name": "another/model", "fingerprint": "0" * 64}
    put_into(asked / "bench.json", dense=read_json(asked / "bench.json")["dense"] | other)
    models = read_json(asked / "fidelity.json")["fingerprint"] | {"against": other["fingerprint"]}
    put_into(asked / "fidelity.json", against=other["name"], fingerprint=models)
    results = RunResults(made)
    assert results.of_others == ["bench", "fidelity"]
    page = markdown(results)
    assert "## Closeness to the dense model" not in page
    assert "closeness to the dense model" in page.split("## Not measured yet")[1].lower()


def test_results_of_an_earlier_export_are_left_out_and_said(measured, tmp_path, command):
    made = Path(shutil.copytree(measured, tmp_path / "run"))
    asked, earlier = made / "6_evaluate", "0" * 64
    task = read_json(asked / "tasks/piqa.json")
    put_into(asked / "tasks/piqa.json", model=task["model"] | {"fingerprint": earlier})
    put_into(asked / "curve.json", fingerprint=earlier)
    put_into(asked / "bench.json", moe={"name": "run"})  # of a version that did not say
    other = read_json(asked / "against/boolq.json")
    put_into(asked / "against/boolq.json", model=other["model"] | {"fingerprint": earlier})
    compared = read_json(asked / "perplexity.json")  # with a dense model that changed later
    put_into(asked / "perplexity.json", against=compared["against"] | {"fingerprint": earlier})
    results = RunResults(made)
    left_out = ["against/boolq", "bench", "curve", "perplexity", "tasks/piqa"]
    assert results.of_others == left_out
    assert not {*left_out} & results.files.keys()
    assert set(results.tasks["model"]["tasks"]) == {"boolq"}
    said = markdown(results).split("## Not measured yet")[1]
    assert ", ".join(f"{name}.json" for name in left_out) in said
    assert "--curve" in said
    assert "dotmoe bench" in said


def test_an_edited_export_is_measured_as_it_is_and_the_page_says_so(
    finished, command, tmp_path, caplog
):
    run, again = finished.copied_to(tmp_path / "run").folder, tmp_path / "again"
    text = {"text": finished.options["data"], "max_tokens": 600, "json": []}
    options = {"active_experts": 5, "device": "cpu"}
    assert command("export", run, again, **options).status == 0
    expected = json.loads(command("evaluate", again, **text).out)["loss"]
    before = json.loads(command("evaluate", run, **text).out)["loss"]
    assert "edited" not in caplog.text
    export = run / "5_export"
    put_into(export / "tokenizer_config.json", model_max_length=77)
    put_into(export / "config.json", num_experts_per_tok=5)
    measured = command("evaluate", run, **text)
    assert json.loads(measured.out)["loss"] == pytest.approx(expected, rel=1e-4)
    assert abs(expected - before) > 1e-3
    said = "was edited after the export"
    assert f"{export}/config.json {said} (num_experts_per_tok 5, written with 3)" in caplog.text
    assert f"{export}/tokenizer_config.json {said}; it is used as it is" in caplog.text
    assert command(*finished.at(run).command()).status == 0, "a finished run says what it has"
    page = (run / "7_report" / "report.md").read_text()
    assert "were edited after this was measured" in page
    assert "It was, until its files were edited" in page
    put_into(export / "config.json", num_experts_per_tok=13)
    line = command("evaluate", run, **text).refusal()
    assert "is 13, but there are 12 experts a layer. Set it to a number from 1 to 12." in line
    (export / "config.json").write_text((export / "config.json").read_text()[:99])
    assert f"{export}/config.json is damaged: 99 of " in command("evaluate", run, **text).refusal()


def test_every_command_that_reads_a_run_says_that_its_export_was_edited(
    finished, finetuned, command, tmp_path, caplog, forked_workers
):
    run = finished.copied_to(tmp_path / "run").folder
    edited, said = run / "5_export" / "config.json", "was edited after the export (num_experts_per"
    put_into(edited, num_experts_per_tok=5)
    short = {"batch_sizes": 1, "prompt_tokens": 0, "context_tokens": 8, "decode_steps": 1}
    commands = {
        "analyse": (run,),
        "export": (run, tmp_path / "again"),
        "bench": (finished.source, run),
    }
    options = {
        "analyse": {"tokens": 64},
        "export": {"device": "cpu"},
        "bench": {**short, "rounds": 1, "json": []},
    }
    for name, places in commands.items():
        caplog.clear()
        ran = command(name, *places, **options[name])
        assert ran.status == 0, ran.err
        assert f"{edited} {said}" in caplog.text + ran.err, name
    tuned = command("finetune", run, tmp_path / "finetuned", **finetuned.options)
    assert f"{edited} is 5, but the export was written and measured with 3. Set" in tuned.refusal()
    put_into(edited, num_experts_per_tok=13)
    assert "is 13, but there are 12 experts a layer" in command("analyse", run).refusal()


def test_a_page_without_matplotlib_says_so(bare, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert run(["report", str(bare)]) == 0
    page = read_page(bare / "7_report" / "report.html")
    assert NO_PLOT in page.text
    assert "img" not in page.tags


def test_the_command_writes_the_page_of_a_finished_run(bare, tmp_path, capsys):
    page = bare / "7_report" / "report.html"
    page.unlink()
    assert run(["report", str(bare)]) == 0
    assert (capsys.readouterr().out.strip(), page.is_file()) == (str(page), True)
    for wrong in (tmp_path / "none", tmp_path):
        assert run(["report", str(wrong)]) == 2
    assert "none is no finished run. Name" in capsys.readouterr().err
    (bare / "6_evaluate" / "results.json").unlink()
    with pytest.raises(UserError, match="is no finished run"):
        html_report(bare)


@pytest.mark.parametrize(
    "name",
    [
        *("manifest.json", "2_align/metrics.jsonl", "5_export/dotmoe.json"),
        *("6_evaluate/results.json", "6_evaluate/analysis/expert_utilisation.json"),
    ],
)
def test_a_damaged_file_is_one_line_and_no_page(measured, name, capsys):
    path, page = measured / name, measured / "7_report" / "report.html"
    before, written = path.read_text(), page.stat().st_mtime_ns
    damages = [before[: len(before) * 2 // 3], "[1, 2]\n"]
    if name in ("6_evaluate/results.json", "manifest.json"):
        damages.append('{"provenance": {}}')
    try:
        for damage in damages:
            path.write_text(damage)
            assert run(["report", str(measured)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("dotmoe: error: ")
            assert str(path) in line
            assert page.stat().st_mtime_ns == written
    finally:
        path.write_text(before)


def test_text_that_falls_short_and_names_with_html_reach_every_page(finished, tmp_path, command):
    tag = "<img src=x onerror=alert(1)>"
    model = shutil.copytree(finished.source, tmp_path / tag)
    data = tmp_path / f"{tag}.jsonl"
    data.write_text('{"text": "a short row of text"}\n{"text": null}\n' * 50)
    made = replace(finished, source=model).at(tmp_path / "run", data=data)
    done = command(*made.command())
    assert done.status == 0
    used = json.loads((made.folder / "0_data/data.json").read_text())["training"]
    said = f"{used['tokens']:,} of {used['asked']:,} tokens asked, because the data end there"
    assert f"training text: {said}" in done.err
    for name in ("5_export/README.md", "7_report/report.md", "7_report/report.html"):
        text = (made.folder / name).read_text()
        assert f"Training text: {said}." in text
        assert "50 without text were left out, 50 documents used" in text
        assert "&lt;img" in text
        assert "<img src=x" not in text
