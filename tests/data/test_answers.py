"""Own answers. Oracles: the tokenizer's chat template, the model's argmax, a killed writer."""

import json
from dataclasses import replace

import pytest

from dotmoe.common.progress import Progress
from dotmoe.models import chat
from dotmoe.models.sampling import Sampling
from dotmoe.text import writing
from dotmoe.text.answering import Answering
from dotmoe.text.answers import OwnAnswers, read_answers
from dotmoe.text.answers_of_run import own_answers
from dotmoe.text.config import DataConfig
from dotmoe.text.questions import Question, own_prompts, question
from dotmoe.text.writing import own_turns, write_answers, write_continuations
from runs import refusal

CHATML = (
    "{% for m in messages %}<u>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant:{% endif %}"
)
HOW = Sampling(temperature=0.0, new_tokens=6)
DRAWN = Sampling(temperature=1.0, new_tokens=6)
QUESTIONS = [question("One?", "a"), question("Two and three?", "b"), question("Four", "b")]


@pytest.fixture
def speaker(dense):
    dense.tokenizer.chat_template = CHATML
    return dense


def test_the_template_says_how_turns_begin_and_end(speaker):
    tokenizer = speaker.tokenizer
    asked = chat.asked(tokenizer, [{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(asked) == "<u>user:Hi</s><u>assistant:"
    assert tokenizer.decode(chat.user_opening(tokenizer)) == "<u>user:"
    assert chat.end_tokens(speaker.model, tokenizer) == {tokenizer.eos_token_id}


def test_a_template_that_says_nothing_or_refuses_is_named_where_it_is_needed(speaker):
    speaker.tokenizer.chat_template = "{{ '' }}"
    said = refusal(chat.asked, speaker.tokenizer, [{"role": "user", "content": "Hi"}])
    assert "writes nothing for a question" in said
    speaker.tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert chat.end_tokens(speaker.model, speaker.tokenizer) == {speaker.tokenizer.eos_token_id}
    text = DataConfig(data=("a.txt",), seq_len=64)
    how = {"identity": "x", "tokens": 100, "seed": 0, "progress": Progress(quiet=True)}
    for heldout in (0, 2):  # a text needs no answers to be fitted to
        assert own_answers(speaker, text, heldout=heldout, **how) == OwnAnswers(wanted_tokens=100)


def test_answers_are_chats_that_anyone_can_read_with_the_ids_as_drawn(speaker, tmp_path):
    path = tmp_path / "answers.jsonl"
    made = write_answers(speaker, QUESTIONS, path, HOW, seed=0)
    assert read_answers(path) == made
    for answer, asking, line in zip(made, QUESTIONS, path.open(), strict=True):
        prompt = chat.asked(speaker.tokenizer, asking.messages)
        assert list(answer.ids[: answer.answer_start]) == prompt
        assert 0 < len(answer.ids) - len(prompt) <= 6
        row = json.loads(line)
        assert row["messages"][0] == asking.messages[0]
        assert row["messages"][1]["role"] == "assistant"
        assert row["kind"] == asking.kind


def test_a_stopped_writer_goes_on_after_what_it_wrote(speaker, tmp_path, monkeypatch):
    whole = write_answers(speaker, QUESTIONS, tmp_path / "whole.jsonl", HOW, seed=0)
    path, parts = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.parts"

    def stopping(*arguments, **options):
        yield next(answers_of(*arguments, **options))
        raise KeyboardInterrupt

    answers_of = writing.continuations
    monkeypatch.setattr(writing, "continuations", stopping)
    with pytest.raises(KeyboardInterrupt):
        write_answers(speaker, QUESTIONS, path, HOW, seed=0)
    assert not path.exists()
    with parts.open("a") as file:
        file.write('{"number": 2, "mess')  # killed while it wrote

    def rest(model, prompts, *arguments, **options):
        assert len(prompts) == 2
        return answers_of(model, prompts, *arguments, **options)

    monkeypatch.setattr(writing, "continuations", rest)
    assert write_answers(speaker, QUESTIONS, path, HOW, seed=0) == whole
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not parts.exists()


@pytest.mark.parametrize("damage", [b"", b'{"messages": [', None])
def test_damaged_answers_of_the_cache_are_written_again(damage, speaker, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(writing, "ANSWERS", HOW)
    answering = Answering(speaker, "a model", 0, Progress(quiet=True))
    first = answering.answers(QUESTIONS, 0, "answers", room=64)
    (file,) = (tmp_path / "dotmoe/answers").glob("*.jsonl")
    whole = file.read_bytes()
    damaged = whole.replace(b'"finished": ', b'"finished":  ', 1) if damage is None else damage
    file.write_bytes(damaged)
    assert answering.answers(QUESTIONS, 0, "answers", room=64) == first
    assert file.read_bytes() == whole
    file.with_suffix(".sha256").unlink()  # of a version that kept none
    monkeypatch.setattr(writing, "continuations", None)
    assert answering.answers(QUESTIONS, 0, "answers", room=64) == first


@pytest.mark.parametrize("kind", ["chats", "texts"])
def test_what_a_stopped_writer_goes_on_with_is_what_it_would_have_written(
    kind, speaker, tmp_path, monkeypatch
):
    """Drawn, not greedy: by number, whatever is written beside."""
    monkeypatch.setattr(writing, "FREE", replace(DRAWN, rows=2))

    def written(name):
        if kind == "texts":
            return write_continuations(speaker, 7, tmp_path / name, seed=3)
        questions = [question(f"What is {number}?") for number in range(7)]
        return write_answers(speaker, questions, tmp_path / name, replace(DRAWN, rows=2), seed=3)

    whole, one_by_one = written("whole"), writing.continuations

    def stopping(*arguments, **options):
        for number, made in enumerate(one_by_one(*arguments, **options)):
            if number == 3:
                raise KeyboardInterrupt
            yield made

    with monkeypatch.context() as patch:
        patch.setattr(writing, "continuations", stopping)
        with pytest.raises(KeyboardInterrupt):
            written("stopped")
    assert len((tmp_path / "stopped.parts").read_text().splitlines()) == 3
    assert written("stopped") == whole
    assert len({each.ids for each in whole}) > 1


def test_a_chat_is_no_longer_than_its_room(speaker, tmp_path):
    whole = write_answers(speaker, QUESTIONS, tmp_path / "whole", HOW, seed=0)
    room = max(each.answer_start for each in whole) + 2
    cut = write_answers(speaker, QUESTIONS, tmp_path / "cut", HOW, seed=0, room=room)
    for short, long in zip(cut, whole, strict=True):
        assert short.ids == long.ids[:room]
        assert short.finished is (long.finished and len(long.ids) <= room)


def test_bookkeeping_of_a_message_does_not_decide_what_is_held_out():
    plain = [question(f"What is {number}?") for number in range(40)]
    marked = [
        Question(messages=({**each.messages[0], "id": number},))
        for number, each in enumerate(plain)
    ]
    assert [each.is_heldout for each in marked] == [each.is_heldout for each in plain]


def test_a_model_writes_turns_of_its_own_without_repeats(speaker):
    words = [turn.messages[0]["content"] for turn in own_turns(speaker, 5, seed=0)]
    assert len(set(words)) == 5
    assert all(words)
    others = {turn.messages[0]["content"] for turn in own_turns(speaker, 5, seed=1)}
    assert not others & set(words)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("What is 2.5 miles? Tell me in kilo", "What is 2.5 miles?"),
        ("Sort this.\n\nThen do", "Sort this."),
        ("\u4f60\u597d\uff01\u8bf7\u5199", "\u4f60\u597d\uff01"),
        ("Write a function that ret", "Write a function that"),
        ("Unfinishe", ""),
    ],
)
def test_a_turn_that_does_not_end_is_cut_behind_a_sentence(written, kept):
    assert writing._whole_sentences(written) == kept


def test_prompts_of_the_package_are_distinct_and_none_is_measured_and_fitted():
    fitted, measured = own_prompts("asked"), own_prompts("heldout")
    words = [each.messages[0]["content"] for each in (*fitted, *measured)]
    assert len(set(words)) == len(words)
    assert not {each.kind for each in fitted} & {each.kind for each in measured}
    assert 0.05 < sum(each.is_heldout for each in fitted) / len(fitted) < 0.25
