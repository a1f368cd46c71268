"""Only what was measured alike is subtracted, and no figure is taken beyond a context."""

import json
import math
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from dotmoe.common.errors import UserError
from dotmoe.measure.config import EvaluateConfig, TextConfig
from dotmoe.measure.evaluate import evaluate
from dotmoe.measure.evaluate.difference import (
    IncomparableError,
    difference,
    require_asked_alike,
    shown_difference,
    times_perplexity,
)
from dotmoe.measure.evaluate.perplexity import perplexity_table
from dotmoe.measure.evaluate.task_tables import shown_tasks
from dotmoe.models.config import LoadConfig
from dotmoe.text.blocks import TokenBlocks
from runs import TINY_CONVERT, TinyRun

CPU = LoadConfig(device="cpu")
RESULT = {
    "loss": 2.0,
    "perplexity": math.exp(2.0),
    "bits_per_byte": 1.5,
    "window": 9,
    "tokens": 24,
    "unit": "token",
    "window_losses": [1.0, 2.0, 3.0],
    "text": ["here/a.txt"],
    "text_sha256": "t",
    "ids_sha256": "i",
    "protocol": "",
}
OLD = {name: value for name, value in RESULT.items() if not name.endswith("sha256")}


@pytest.fixture
def two_models(tiny_dense, tmp_path, text_file):
    """Measures perplexity of two models; the second has a context of 64, and its own tokenizer."""
    short = tiny_dense("llama", max_position_embeddings=64)
    other = shutil.copytree(tiny_dense("llama", vocab_size=600), tmp_path / "other")
    zoo.write_tokenizer(other, "llama2")
    folders = {"long": tiny_dense("llama"), "short": short, "other": other}

    def measured(model, against, **corpus):
        text = TextConfig(text=(str(text_file),), **corpus)
        names = {"model": str(folders[model]), "against": str(folders[against])}
        return evaluate(EvaluateConfig(**names, corpus=text, load=CPU))["perplexity"]

    return measured


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 5}, "in windows of 5 tokens and one in windows of 9"),
        ({"tokens": 23}, "over 23 tokens"),
        ({"ids_sha256": "j", "text_sha256": "u"}, "losses on other tokens"),
        ({"ids_sha256": "j", "text_sha256": None}, "Leave --max-tokens out"),
        ({"ids_sha256": "j"}, "losses per token of two tokenizers"),
    ],
)
def test_losses_that_were_not_measured_alike_are_not_subtracted(change, words):
    with pytest.raises(IncomparableError, match=words):
        difference(RESULT | change, RESULT)
    assert times_perplexity(RESULT | change, RESULT) is None
    table = perplexity_table({"dense": RESULT, "moe": RESULT | change | {"bits_per_byte": 1.25}})
    (cell,) = [row[3] for row in table.rows if row[0] == "moe"]
    if change == {"ids_sha256": "j"}:
        assert cell == "-0.2500 bits per byte"
        assert "Two tokenizers read the text" in table.note
    else:
        assert cell == "-"
        assert "No difference: " in table.note
        assert re.search(words, table.note)


def test_results_of_older_versions_are_compared_by_names_and_counts():
    assert difference(OLD | {"loss": 2.5, "text": ["there/a.txt"]}, OLD) == (0.5, 0.0)
    with pytest.raises(IncomparableError, match=r"on b\.txt and one on a\.txt"):
        difference(OLD | {"text": ["here/b.txt"]}, OLD)


def test_two_models_are_measured_in_windows_of_the_smaller_context(two_models):
    """Both at once, whichever is named first; as each alone in such windows."""
    labels = ("model", "against")
    for sides in (("long", "short"), ("short", "long")):
        found = two_models(*sides, max_tokens=1000)
        assert [found[side]["window"] for side in labels] == [64, 64]
        again = two_models(*sides, max_tokens=1000, window=64)
        assert [found[side] for side in labels] == [again[side] for side in labels]
        change, stderr = difference(found["model"], found["against"])
        assert change == found["model"]["loss"] - found["against"]["loss"]
        assert stderr > 0
        with pytest.raises(UserError, match="window is 128, but must lie in 2 to 64"):
            two_models(*sides, window=128)
    assert two_models("long", "long", max_tokens=1000)["model"]["window"] == 256


def test_two_tokenizers_are_compared_in_bits_per_byte_of_a_whole_text_alone(two_models):
    found = two_models("long", "other", window=32)
    model, against = found["model"], found["against"]
    cell, note = shown_difference(model, against)
    change = model["bits_per_byte"] - against["bits_per_byte"]
    assert cell == f"{change:+.4f} bits per byte"
    assert "Two tokenizers" in note
    assert model["tokens"] != against["tokens"]
    cut = two_models("long", "other", window=32, max_tokens=320)
    assert cut["model"]["tokens"] == cut["against"]["tokens"] == 310
    assert shown_difference(cut["model"], cut["against"])[0] == "-"
    with pytest.raises(IncomparableError, match="two tokenizers read the beginning of one"):
        difference(cut["model"], cut["against"])


def test_predictions_of_two_tokenizers_have_no_fidelity(tiny_dense, tmp_path, text_file):
    model = shutil.copytree(dense := tiny_dense("llama", vocab_size=600), tmp_path / "model")
    zoo.write_tokenizer(model, "llama2")
    corpus = TextConfig(text=(str(text_file),), max_tokens=64)
    names = {"model": str(model), "against": str(dense), "fidelity": True}
    with pytest.raises(IncomparableError, match="tokenizers that cut the text differently"):
        evaluate(EvaluateConfig(**names, corpus=corpus, load=CPU))


TASK = {
    "identity": {"shots": 0, "limit": None, "data": {"test": {"sha256": "a"}}, "harness": "1"},
    "model": {"context": 64},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"identity": TASK["identity"] | {"shots": 1}}, r"other shots \(1 and 0\)"),
        ({"identity": TASK["identity"] | {"limit": 9}}, r"other limit \(9 and None\)"),
        ({"identity": TASK["identity"] | {"data": "hub"}}, "other data"),
        ({"identity": TASK["identity"] | {"harness": "2"}}, "other harness"),
        ({"model": {"context": 512}}, "cut off at 512 and 64 tokens"),
    ],
)
def test_scores_of_questions_asked_otherwise_have_no_difference(change, words):
    with pytest.raises(IncomparableError, match=words):
        require_asked_alike(TASK | change, TASK)
    require_asked_alike(TASK, TASK)
    require_asked_alike({}, TASK)  # of a version that did not record it
    score = {"task": "piqa", "metric": "acc", "value": 0.5, "stderr": 0.1, "is_main": True}
    score |= {"shots": 0, "questions": 25, "chance": 0.5}
    task = TASK | {"task": "piqa", "scores": [score], "notes": []}
    sides = {"model": task | change, "against": task}
    common = {"averages": {}}
    result = {n: {"name": n, "tasks": {"piqa": side}} | common for n, side in sides.items()}
    table, note = shown_tasks(result)
    assert table.rows[0][-1] is None
    assert re.search(f"piqa: no difference: .*{words}", note)


def test_tasks_of_two_models_are_asked_within_the_smaller_context(
    tiny_dense, tmp_path, command, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    row = {"goal": "count one more " * 9, "sol1": "say 1", "sol2": "no", "label": 0}
    data = tmp_path / "data/piqa/validation.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text(f"{json.dumps(row)}\n" * 4)
    short, long = tiny_dense("llama", max_position_embeddings=64), tiny_dense("llama")
    options = {"tasks": "piqa", "task_data": tmp_path / "data", "device": "cpu", "json": []}
    said = command("evaluate", short, against=long, out=tmp_path / "out", **options)
    found = json.loads(said.out)
    sides = [found[side]["tasks"]["piqa"] for side in ("model", "against")]
    assert [side["model"]["context"] for side in sides] == [64, 64]
    assert all(any("longer than 64 tokens" in note for note in side["notes"]) for side in sides)
    assert any("64 tokens, the context of the model beside" in note for note in sides[1]["notes"])
    # Alone it is asked in the same way, as its own context is the smaller.
    again = command("evaluate", short, out=tmp_path / "out", **options)
    assert "piqa is finished already" in again.err
    options |= {"max_length": 65, "against": long, "out": tmp_path / "out2"}
    assert (
        "--max-length is 65, but must lie in 2 to 64"
        in command("evaluate", short, **options).refusal()
    )


def test_a_conversion_is_measured_within_the_context_of_its_export(
    tiny_dense, text_file, tmp_path, command
):
    """Windows of 64 where the export has no sliding one: oracle, the loss by Transformers."""
    model = tiny_dense("phi3", sliding_window=32)
    options = {"data": text_file, **TINY_CONVERT, "seq_len": 64, "format": "glm4_moe"}
    options |= {"steps": 0, "repair_epochs": 0}
    del options["no_repair"]
    made = TinyRun("convert", model, tmp_path / "run", options).made().folder
    results = json.loads((made / "6_evaluate/results.json").read_text())
    sides = [results[name] for name in ("dense", "frozen", "moe")]
    assert [side["window"] for side in sides] == [32] * 3
    difference(results["frozen"], results["dense"])
    exported = AutoModelForCausalLM.from_pretrained(made / "5_export", dtype=torch.float32)
    assert exported.config.max_position_embeddings == 32
    tokens = TokenBlocks.load(made / "0_data/heldout.safetensors").tokens_BT.view(-1, 32).long()
    with torch.no_grad():
        loss = float(exported(input_ids=tokens, labels=tokens).loss)
    assert results["moe"]["loss"] == pytest.approx(loss, rel=1e-4)
