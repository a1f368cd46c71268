"""The page says what the result files say, loads nothing, and names what is missing."""

import json
import math
import re
import shlex

import pytest
from pages import read_page
from written_runs import HOSTILE, write_run

from dotmoe.cli import COMMANDS, run
from dotmoe.errors import UserError
from dotmoe.report import NO_PLOTS, html_report, report
from dotmoe.report.html_page import rendered
from dotmoe.report.result_files import ANALYSES, MEASUREMENTS, read_run


def page_of(run_folder):
    return read_page(run_folder / "7_report" / "report.html")


def test_the_page_is_whole_html_that_loads_nothing(full):
    page = page_of(full)
    tags = page.tags()
    assert tags.count("h1") == 1
    assert tags.count("section") > 10
    assert not {"script", "link", "iframe", "object", "img"} & set(tags)
    for attribute in ("src", "href", "xlink:href", "srcset", "data"):
        assert all(value[:1] == "#" or value[:5] == "data:" for value in page.values_of(attribute))
    source = (full / "7_report" / "report.html").read_text()
    assert not re.search(r"@import|url\((?!#)", source)
    ids = page.values_of("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in page.values_of("href")} <= set(ids)


def test_the_page_fits_a_phone_and_lets_a_browser_refuse_scripts(bare_run):
    page = read_page(html_report(bare_run))
    metas = [attrs for tag, attrs in page.elements if tag == "meta"]
    content = {meta.get("name") or meta.get("http-equiv"): meta.get("content") for meta in metas}
    assert content["viewport"] == "width=device-width, initial-scale=1"
    assert content["Content-Security-Policy"].startswith("default-src 'none'")
    for index, (tag, _) in enumerate(page.elements):
        if tag == "table":
            assert page.elements[index - 1][1]["class"] == "scrolls"


def test_figures_are_those_of_the_result_files(full):
    text = page_of(full).text
    results = json.loads((full / "6_evaluate/results.json").read_text())
    dense, moe = results["dense"], results["moe"]
    for side in (dense, moe):
        assert f"{side['perplexity']:.3f} {side['loss']:.4f}" in text
    more = 100 * (math.exp(moe["loss"] - dense["loss"]) - 1)
    assert f"goes from {dense['perplexity']:.2f} to {moe['perplexity']:.2f}" in text
    assert f"{moe['loss'] - dense['loss']:+.3f} nats a token, perplexity {more:+.1f} %" in text
    assert "held/out.txt" in text
    assert "12,345 tokens" in text
    assert "windows of 64" in text
    for count in results["parameters"].values():
        assert f"{count:,}" in text
    curve = json.loads((full / "6_evaluate/curve.json").read_text())
    for point in curve["points"]:
        shown = f"{point['active_parameters']:,} .* {point['perplexity']:.3f} "
        assert re.search(shown + re.escape(f"{point['loss_above_all_experts']:+.4f}"), text)
    for said in ("0.3333 nats", "78 % of 4,096 tokens", "42.424", "0.4321"[:5], "0.234"):
        assert said in text
    for ratio in (1.37, 1.73):
        assert f"{100 * ratio:.1f} {ratio:.2f} {ratio - 0.05:.2f} to {ratio + 0.05:.2f}" in text


def test_scores_have_errors_chance_and_a_mean(full):
    text = page_of(full).text
    assert "piqa acc 5 200 50 75.0 ± 2.1 62.5 ± 2.1 -12.5" in text
    assert "mine acc 5 200 50 30.0 ± 2.1 29.9 ± 2.1 -0.1" in text
    error = 100 * math.sqrt(2 * 0.0211**2) / 2
    assert f"from {(75 + 30) / 2:.1f} ± {error:.1f} % to {(62.5 + 29.875) / 2:.1f}" in text
    assert "1 of them differ by more than two standard errors" in text
    source = (full / "7_report/report.html").read_text()
    assert re.findall(r"<strong>([-+][\d.]+)</strong>", source) == ["-12.5", "-12.5"]


def test_operations_are_counted_from_the_widths(full):
    text = page_of(full).text
    dense = 2 * (3 * 64 * 96) * 2  # two per product, three matrices, two layers
    moe = 2 * (3 * 64 * 32) * 2
    routers = 2 * (64 * 6) * 2
    shares = [100 * work / dense for work in (moe, routers, moe + routers)]
    assert f"dense FFNs {dense:,} 100 %" in text
    assert f"experts that run {moe:,} {shares[0]:.0f} %" in text
    assert f"routers {routers:,} {shares[1]:.1f} %" in text
    assert f"experts and routers {moe + routers:,} {shares[2]:.0f} %" in text


def test_hostile_text_stays_text(full, quickstart_folder):
    for page in (page_of(full), read_page(html_report(quickstart_folder))):
        assert " ".join(HOSTILE.split()) in page.text
        assert "http://evil" not in "".join(map(str, page.values_of("src")))
        assert not {"script", "img"} & set(page.tags())


def test_what_is_missing_is_named_with_a_command_that_exists(bare_run, full):
    page = read_page(html_report(bare_run))
    assert "Not measured yet" in page.text
    missing = [command for command in page.commands if str(bare_run) in command]
    asked = " ".join(missing)
    for option in ("--tasks", "--curve", "--fidelity", "--generate", "bench", "analyse"):
        assert option in asked
    for command in missing:
        words = shlex.split(command)
        assert words[0] == "dotmoe"
        assert words[1] in COMMANDS
    assert len(page_of(full).commands) == 2  # finetune, and to repeat it


def test_a_page_for_each_kind_of_run(finetuned_run, quickstart_folder):
    finetuned = read_page(html_report(finetuned_run)).text
    assert "some/dense, finetuned, as a Mixture-of-Experts" in finetuned
    assert f"Before recovery training it was {math.exp(2.4375):.2f} (+0.312 nats)" in finetuned
    assert "adapters" in finetuned
    assert "No dense weight was changed" not in finetuned
    quick = read_page(html_report(quickstart_folder)).text
    assert f"random split, router trained {math.exp(3.0625):.3f}" in quick
    assert (quickstart_folder / "report.html").is_file()


def test_an_edited_export_is_told_from_what_was_measured(bare_run):
    assert "now runs" not in read_page(html_report(bare_run)).text
    record = bare_run / "5_export" / "dotmoe.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"active_experts": 3}))
    text = read_page(html_report(bare_run)).text
    assert "The export now runs k = 3; the figures of this page were measured at k = 2." in text


def test_the_same_files_give_the_same_page(full, drawn_again):
    again = rendered(read_run(full), drawn_again)
    assert again == (full / "7_report" / "report.html").read_text(encoding="utf-8")


def test_a_page_without_matplotlib_says_so(measured_run, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert run(["report", str(measured_run)]) == 0
    printed = capsys.readouterr()
    assert printed.err.split() == NO_PLOTS.split()
    page = read_page(measured_run / "7_report" / "report.html")
    assert NO_PLOTS in page.text
    assert "svg" not in page.tags()
    assert not (measured_run / "7_report" / "plots").exists()


def test_the_command_writes_where_it_is_told(bare_run, tmp_path, capsys):
    out = tmp_path / "a.html"
    assert run(["report", str(bare_run), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert not (bare_run / "7_report").exists()
    assert run(["report", str(bare_run), "--out", str(tmp_path / "no" / "a.html")]) == 2
    assert run(["report", str(tmp_path / "nowhere")]) == 2
    assert run(["report", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err


def test_markdown_and_html_come_together(bare_run, tmp_path):
    record = json.loads((bare_run / "config.json").read_text())
    assert record["model"] == "some/dense"
    page = report(bare_run, tmp_path)
    assert page == tmp_path / "report.html"
    assert (tmp_path / "report.md").read_text().startswith("# some/dense")


FILES = [
    "config.json",
    "2_align/metrics.jsonl",
    "5_export/dotmoe.json",
    "6_evaluate/results.json",
    "6_evaluate/tasks/piqa.json",
    *(f"6_evaluate/{name}.json" for name in MEASUREMENTS if name != "perplexity"),
    *(f"6_evaluate/analysis/{name}.json" for name in ANALYSES),
]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_line_and_no_page(whole_run, name, capsys, monkeypatch):
    monkeypatch.setattr("dotmoe.report.html_page.is_installed", lambda: False)  # plots take time
    path = whole_run / name
    before = path.read_text()
    damages = [before[: len(before) * 2 // 3], "[1, 2]\n"]
    if name not in ("config.json", "2_align/metrics.jsonl"):
        damages.append('{"provenance": {}}')
    try:
        for damage in damages:
            path.write_text(damage)
            assert run(["report", str(whole_run)]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == 1, lines
            assert lines[0].startswith("dotmoe: error: ")
            assert path.parent.name in lines[0]
            assert not (whole_run / "7_report").exists()
    finally:
        path.write_text(before)


def test_an_unfinished_run_is_refused(bare_run):
    (bare_run / "6_evaluate" / "results.json").unlink()
    with pytest.raises(UserError, match="is not finished"):
        html_report(bare_run)
