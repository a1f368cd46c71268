"""`dotmoe edit` and `dotmoe evaluate --curve`: another k, in place and as a curve."""

import json

import pytest

from dotmoe.cli import run


def evaluated(arguments, capsys):
    capsys.readouterr()
    assert run(["evaluate", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_curve_is_the_perplexity_of_the_edited_export(finished, tmp_path, capsys):
    folder, model = finished
    options = ["--text", tmp_path / "text.txt", "--max-tokens", "600", "--window", "64"]
    curve = evaluated([folder, *options, "--curve", "2", "5"], capsys)
    by_k = {point["active_experts"]: point["perplexity"] for point in curve["points"]}
    assert list(by_k) == [2, 5, 12]
    for active_experts, expected in by_k.items():
        assert run(["edit", str(folder), "--active-experts", str(active_experts)]) == 0
        found = evaluated([folder / "5_export", *options], capsys)["perplexity"]
        assert found == pytest.approx(expected, rel=1e-5)
    dense = evaluated([model, *options], capsys)["perplexity"]
    assert by_k[12] == pytest.approx(dense, rel=1e-3)


def test_a_curve_without_numbers_is_a_ladder_up_to_all_experts(finished, tmp_path, capsys):
    options = ["--text", tmp_path / "text.txt", "--max-tokens", "300", "--window", "64"]
    curve = evaluated([finished[0], *options, "--curve"], capsys)
    found = [point["active_experts"] for point in curve["points"]]
    assert {3, 12} <= set(found)
    assert len(found) > 4
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["edit", "RUN", "--active-experts", "13"], "Choose 1 to 12"),
        (["edit", "RUN", "--active-experts", "0"], "Choose 1 to 12"),
        (["edit", "TEXT", "--active-experts", "2"], "text.txt"),
        (["evaluate", "RUN", "--text", "TEXT", "--curve", "99"], "Choose 1 to 12"),
        (["evaluate", "RUN", "--text", "TEXT", "--plot", "curve.svg"], "--curve is not given"),
        (["evaluate", "RUN", "--text", "TEXT", "--curve", "--plot", "curve.txt"], ".svg"),
    ],
)
def test_wrong_use_is_refused_in_one_line(arguments, words, finished, tmp_path, capsys):
    names = {"RUN": str(finished[0]), "TEXT": str(tmp_path / "text.txt")}
    before = (finished[0] / "5_export" / "config.json").read_bytes()
    capsys.readouterr()
    assert run([names.get(word, word) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert (finished[0] / "5_export" / "config.json").read_bytes() == before


def test_a_k_folded_into_weights_is_refused_with_the_way_out(finished, quick, tmp_path, capsys):
    out = str(tmp_path / "twin")
    assert run(["export", str(finished[0]), out, "--format", "mixtral", *quick]) == 0
    capsys.readouterr()
    assert run(["edit", out, "--active-experts", "2"]) == 2
    assert "dotmoe export" in capsys.readouterr().err
