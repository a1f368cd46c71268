"""What is said to users follows the likely cause."""

import re

import pytest

from dotmoe.measure.report import page, sections
from runs import TINY_CONVERT, put_into, rewritten

CHANCE = "predicts no better than chance"


def test_a_model_that_has_learned_nothing_is_named_before_anything_is_paid(
    command, copied, text_file, tmp_path, caplog
):
    """Equal chances for 264 tokens give log(264) = 5.58 nats."""
    how = TINY_CONVERT | {"data": text_file, "method": "contiguous_split", "steps": 0}
    del how["lr"]
    with rewritten(copied) as tensors:
        tensors["lm_head.weight"] *= 0.01
    said = command("convert", copied, tmp_path / "random", **how)
    assert said.status == 0
    expected = rf"{CHANCE}: 5\.5[78] nats per token over 248 tokens .* 264 tokens give 5\.58"
    assert re.search(expected, caplog.text)
    caplog.clear()
    assert command("convert", copied, tmp_path / "random", **how).status == 0
    assert CHANCE not in caplog.text


def test_a_trained_model_is_not_suspected(command, tmp_path, caplog):
    text = tmp_path / "story.txt"
    text.write_text(
        "Once upon a time there was a little girl. She liked to play in the park.\n" * 99
    )
    how = TINY_CONVERT | {"data": text, "expert_size": 32, "steps": 1}
    said = command("convert", "embedded", tmp_path / "run", **how)
    assert (said.status, CHANCE in caplog.text) == (0, False), said.err


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (167, "No such size divides the FFN width 167. Choose another model"),
        (172, "No such size divides the FFN width 172. Give --export-dtype float32, or choose"),
        (96, "Choose such an --expert-size"),
    ],
)
def test_a_width_without_an_expert_size_is_said_to_have_none(
    width, words, command, tiny_dense, text_file, tmp_path
):
    model = tiny_dense("llama", intermediate_size=width, dtype="bfloat16")
    how = TINY_CONVERT | {"data": text_file, "expert_size": 4 if width == 172 else 1, "active": 0.5}
    how["expert_size"] = 4 if width == 96 else how["expert_size"]
    assert words in command("convert", model, tmp_path / "out", **how).refusal()


@pytest.mark.parametrize(("template", "is_chat"), [(None, False), ("{{ messages }}", True)])
def test_a_template_that_is_null_is_none(template, is_chat, finished, tmp_path):
    run = finished.copied_to(tmp_path / "run")
    put_into(run.folder / "5_export/tokenizer_config.json", chat_template=template)
    shown = page._what_next(page.RunResults(run.folder))
    words = [word for each in shown for word in getattr(each, "words", ())]
    assert ("--chat-template" in words) == is_chat


@pytest.mark.parametrize("loops", [True, False])
def test_a_model_that_repeats_itself_is_shown_with_a_penalty(loops, finished):
    ends = [0] * 8 if loops else [1] * 8
    alike = {
        **{"kl": 0.1, "kl_stderr": 0.01, "top1": 0.9, "times_dense": 1.1, "answers": 8},
        **{"ended": ends[0], "dense_ended": 1.0, "answer_ends": ends},
        "with_penalty": {"ended": 1.0, "dense_ended": 1.0, "answer_ends": [1] * 8},
    }
    results = page.RunResults(finished.folder)
    results.results["own_answers"] = {"moe": {"alike": alike}}
    shown = page._what_next(results)
    words = [word for each in shown for word in getattr(each, "words", ())]
    assert ("--repetition-penalty" in words) == loops
    said = "0 % of its answers end, 100 % with repetition_penalty 1.1"
    assert any(said in str(each) for each in shown) == loops
    assert (said in page.markdown(results)) == loops
    assert "100 % of 100 %" in page.markdown(results)
    assert "100 % of 100 %" in page.html(results)


@pytest.mark.parametrize(("penalty", "said"), [(1.0, False), (1.1, True)])
def test_a_report_says_with_which_penalty_text_was_written(penalty, said, finished):
    results = page.RunResults(finished.folder)
    model = {"name": "a", "prompts": ["Who?"], "texts": ["I."]}
    written = {"temperature": 0.0, "repetition_penalty": penalty, "model": model}
    first = sections._generation(results, written)[0]
    assert ("with repetition_penalty 1.1" in first) == said
    del written["repetition_penalty"]  # of an earlier version
    assert "penalty" not in sections._generation(results, written)[0]
