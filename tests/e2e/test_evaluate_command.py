"""`dotmoe evaluate` beyond perplexity: one measurement at a time, printed as JSON and kept."""

import json

import pytest

from dotmoe.cli import run


def evaluated(arguments, capsys):
    capsys.readouterr()
    assert run(["evaluate", *map(str, arguments)]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_each_measurement_is_printed_and_kept(finished, tmp_path, capsys):
    folder, model = finished
    (tmp_path / "short.txt").write_text("The crow ate seven figs and went on. " * 20)
    text = ["--text", tmp_path / "short.txt"]
    fidelity, said = evaluated(
        [folder, "--fidelity", *text, "--window", 64, "--out", tmp_path / "kept"], capsys
    )
    assert "before the LM head" in said
    assert "FFN output, layer 1" in said
    assert fidelity["against"] == model
    assert fidelity["command"].startswith(f"dotmoe evaluate {folder} --fidelity")
    assert json.loads((tmp_path / "kept" / "fidelity.json").read_text()) == fidelity

    words, said = evaluated(
        [folder, "--against", model, "--word-perplexity", 32, 64, *text], capsys
    )
    windows = {row["window"]: row["word_perplexity"] for row in words["model"]["windows"]}
    assert list(windows) == [32, 64]
    assert f"{windows[64]:.3f}" in said
    assert words["against"]["windows"][0]["word_perplexity"] != windows[32]
    whole, _ = evaluated([folder, "--word-perplexity", *text], capsys)
    assert [row["window"] for row in whole["model"]["windows"]] == [256]

    made, said = evaluated(
        [folder, "--against", model, "--generate", 5, "--prompts", "The crow", "Line"], capsys
    )
    assert made["model"]["prompts"] == ["The crow", "Line"]
    assert "--- 'The crow'" in said
    assert "rep-2" in said

    both, said = evaluated([folder, "--against", model, *text, "--window", 64], capsys)
    alone, _ = evaluated([model, *text, "--window", 64], capsys)
    assert both["against"].items() <= alone.items()
    assert f"{alone['perplexity']:.3f}" in said
    assert both["command"] == f"dotmoe evaluate {folder} --against {model} " + " ".join(
        map(str, [*text, "--window", 64])
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fidelity", "--generate", "3"], "--fidelity and --generate ask for two measurements"),
        (["--fidelity"], "--text names no file"),
        (["--word-perplexity", "512", "--text", "TEXT"], "must lie in 1 to 256"),
        (["--word-perplexity", "--text", "TEXT", "--max-tokens", "9"], "--max-tokens cuts"),
        (["--generate", "3"], "nothing to continue"),
    ],
)
def test_wrong_use_is_refused_in_one_line(arguments, words, tiny_dense, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Some text to measure on.")
    names = {"TEXT": str(tmp_path / "text.txt")}
    model = str(tiny_dense("llama"))
    assert run(["evaluate", model, *(names.get(word, word) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
