"""GGUF from the command line: exported from a run, measured by llama.cpp, refused in one line."""

import json

import pytest

from dotmoe.cli import run

pytest.importorskip("gguf")


def perplexity(model, text, capsys):
    capsys.readouterr()
    assert run(["evaluate", str(model), "--text", str(text), "--max-tokens", "1024"]) == 0
    return json.loads(capsys.readouterr().out)["perplexity"]


@pytest.mark.parametrize("name", ["gguf_glm4moe", "gguf_llama", "gguf_dense"])
@pytest.mark.parametrize("kept_bytes", [0, 2**28])
def test_a_run_becomes_a_gguf_of_the_same_perplexity(
    kept_bytes, name, finished, quick, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("llama_cpp")
    # Small models are kept in memory once they are read; with 0 this one is not.
    monkeypatch.setattr("dotmoe.export.weights_on_disk.KEPT_BYTES", kept_bytes)
    folder, model = finished
    out = tmp_path / name
    command = ["export", str(folder), str(out), "--format", name, "--gguf-type", "f32"]
    assert run([*command, *quick]) == 0
    stock = model if name == "gguf_dense" else folder
    text = tmp_path / "text.txt"
    expected = perplexity(stock, text, capsys)
    tolerance = 1e-4 if name == "gguf_dense" else 2e-2  # near-ties may be routed otherwise
    assert perplexity(out, text, capsys) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "MODEL", "OUT", "--data", "TEXT", "--format", "gguf"], "dotmoe export RUN"),
        (["export", "RUN", "OUT", "--format", "gguf_lama"], "gguf_lama"),
        (["export", "RUN", "OUT", "--format", "gguf", "--gguf-type", "q2"], "q2"),
    ],
)
def test_wrong_use_is_refused_in_one_line(arguments, words, finished, tmp_path, capsys):
    names = {
        "MODEL": finished[1],
        "RUN": str(finished[0]),
        "OUT": str(tmp_path / "out"),
        "TEXT": str(tmp_path / "text.txt"),
    }
    capsys.readouterr()
    assert run([names.get(word, word) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_gguf_without_a_record_needs_its_tokenizer_named(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    command = ["evaluate", str(tmp_path / "model.gguf"), "--text", "python-stdlib-heldout"]
    assert run(command) == 2
    assert "--tokenizer" in capsys.readouterr().err
