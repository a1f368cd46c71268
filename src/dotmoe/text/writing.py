"""What the dense model writes: user's turns, answers, and the texts of a base model."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from dotmoe.common.errors import UserError
from dotmoe.common.progress import Update, no_update
from dotmoe.models.chat import asked, end_tokens, user_opening
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.sampling import Continuation, Sampling, continuations
from dotmoe.text.answers import Answer, answer_from_row, save_answers
from dotmoe.text.config import SELF
from dotmoe.text.questions import Question, question

ANSWERS = Sampling()
"""How a model answers: as its makers advise for most."""
PENALTY = 1.1
"""Penalty on repetition with which held-out questions are answered too, for a damaged model repeats
itself; as the makers of Qwen2.5 advise."""
TURNS = Sampling(temperature=1.0, top_k=100, new_tokens=96)
"""How a model writes the user's turns: with more variety than its answers, and shorter."""
FREE = Sampling(temperature=1.0, top_k=1_000)
"""How a base model writes from nothing."""
ROUNDS = 4
"""How often the same prompts are answered, if that takes to get the tokens."""
_SHORTEST_TURN = 4  # tokens
_SENTENCE_END = re.compile("[.?!](?=\\s)|\n|[\u3002\uff1f\uff01]")
"""The last three are Chinese and Japanese."""


def own_turns(
    dense: DenseModel, num_turns: int, seed: int, on_progress: Update = no_update
) -> list[Question]:
    """Different user's turns that the model writes after its template's bare opening.

    Two thirds of them do not end in `TURNS.new_tokens`; these are cut behind a sentence, so that
    none is paid for and thrown away. There are fewer than `num_turns` if the model repeats itself.
    """
    tokenizer = dense.tokenizer
    opening = user_opening(tokenizer)
    ends = end_tokens(dense.model, tokenizer)
    found = dict[str, Question]()
    for draw in range(ROUNDS):
        openings = [opening] * (num_turns - len(found))
        draw_seed = seed * ROUNDS + draw
        for turn in continuations(dense.model, openings, TURNS, ends, seed=draw_seed):
            text = tokenizer.decode([token for token in turn.ids if token not in ends])
            text = text.strip() if turn.is_finished else _whole_sentences(text)
            if len(turn.ids) > _SHORTEST_TURN and text:
                found.setdefault(text, question(text, SELF))
            on_progress(len(found), num_turns)
        if len(found) == num_turns:
            break
    return list(found.values())


def _whole_sentences(text: str) -> str:
    """Text up to where its last sentence or paragraph ends; without one, up to its last word."""
    ends = [found.end() for found in _SENTENCE_END.finditer(text.strip())]
    if ends:
        return text.strip()[: ends[-1]].strip()
    return text.strip().rpartition(" ")[0]


def write_answers(
    dense: DenseModel,
    questions: Sequence[Question],
    path: Path,
    sampling: Sampling,
    *,
    seed: int,
    room: int | None = None,
    on_progress: Update = no_update,
) -> list[Answer]:
    """Answer questions with the dense model, and write the chats as one JSON object per line.

    Chats have at most `room` tokens, by default the model's context. A stopped process's answers
    are kept in `PATH.parts`: the same call goes on after them. Progress is in questions. Raises
    `UserError` if the model has no chat template, or refuses a question.
    """
    tokenizer = dense.tokenizer
    prompts = [asked(tokenizer, question.messages) for question in questions]

    def to_answer(continuation: Continuation) -> Answer:
        number = continuation.number
        return _answer(tokenizer, questions[number], prompts[number], continuation)

    return _written(
        dense, prompts, path, sampling, to_answer, seed=seed, room=room, on_progress=on_progress
    )


def _answer(
    tokenizer: Any, asking: Question, prompt: list[int], continuation: Continuation
) -> Answer:
    """The chat of a question and what continues its prompt."""
    new = continuation.ids
    text = tokenizer.decode(new[:-1] if continuation.is_finished else new)
    return Answer(
        messages=(*asking.messages, {"role": "assistant", "content": text}),
        kind=asking.kind,
        ids=(*prompt, *new),
        answer_start=len(prompt),
        finished=continuation.is_finished,
    )


def write_continuations(
    dense: DenseModel, num_texts: int, path: Path, *, seed: int, on_progress: Update = no_update
) -> list[Answer]:
    """Texts that a base model writes from nothing: after its BOS, or after the end of a text."""
    tokenizer = dense.tokenizer
    start = tokenizer.bos_token_id
    if start is None:
        start = tokenizer.eos_token_id
    if start is None:
        raise UserError(
            "the model has neither chat template nor BOS nor EOS to start from. Give it text: "
            "--data FILE."
        )

    def to_answer(continuation: Continuation) -> Answer:
        return Answer(
            messages=(),
            kind=SELF,
            ids=(start, *continuation.ids),
            answer_start=1,
            finished=continuation.is_finished,
            text=tokenizer.decode(continuation.ids, skip_special_tokens=True),
        )

    prompts = [[start]] * num_texts
    return _written(
        dense, prompts, path, FREE, to_answer, seed=seed, room=None, on_progress=on_progress
    )


def _written(
    dense: DenseModel,
    prompts: Sequence[Sequence[int]],
    path: Path,
    sampling: Sampling,
    to_answer: Callable[[Continuation], Answer],
    *,
    seed: int,
    room: int | None,
    on_progress: Update,
) -> list[Answer]:
    """Continue prompts, and write the answer that `to_answer` makes of each, in their order.

    Answers are kept in `PATH.parts` until all are there. What is drawn for a prompt does not depend
    on the others, so that a stopped process's texts are those of one that was not stopped.
    """
    parts = path.with_name(path.name + ".parts")
    done = dict(_rows_of(parts))
    left = [number for number in range(len(prompts)) if number not in done]
    before = len(done)
    continued = continuations(
        dense.model,
        [prompts[number] for number in left],
        sampling,
        end_tokens(dense.model, dense.tokenizer),
        seed=seed,
        numbers=left,
        room=room or dense.widths.context,
        on_closed=lambda closed: on_progress(before + closed, len(prompts)),
    )
    with parts.open("a", encoding="utf-8") as file:
        for continuation in continued:
            answer = to_answer(continuation)
            done[continuation.number] = answer
            _append(file, continuation.number, answer)
    answers = [done[number] for number in range(len(prompts))]
    save_answers(answers, path)
    parts.unlink()
    return answers


def _append(file: TextIO, number: int, answer: Answer) -> None:
    """Write an answer with its number at the end of a file, so that a stopped process has it."""
    row = {"number": number} | asdict(answer)
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def _rows_of(parts: Path) -> Iterator[tuple[int, Answer]]:
    """Numbers and answers that a stopped process wrote, up to a line that is not whole."""
    if not parts.is_file():
        return
    lines = parts.read_bytes().splitlines(keepends=True)
    kept = 0
    for line in lines:
        try:
            row = json.loads(line)
            numbered = row.pop("number"), answer_from_row(row)
        except (ValueError, KeyError, TypeError, AttributeError):
            break
        if not line.endswith(b"\n"):
            break
        kept += 1
        yield numbered
    if kept < len(lines):
        parts.write_bytes(b"".join(lines[:kept]))
