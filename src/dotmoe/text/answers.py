"""Own answers and their files: chats whose last message the dense model wrote.

A chat model never writes books or encyclopedias. What is fitted to such text loses its answers, so
the dense model writes the text that it is fitted to (docs/guides/text.md).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dotmoe.common.files import write_text
from dotmoe.models.chat import Message

ALIKE, OTHERS = "alike", "others"
"""Held-out answers to prompts of the kinds that a fit reads; and of kinds that no fit reads."""
_SETS = (ALIKE, OTHERS, f"{ALIKE}_penalised", f"{OTHERS}_penalised", "fitted")
"""Names of the sets of answers of a run, and of their files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A chat whose last message the model wrote."""

    messages: tuple[Message, ...]
    kind: str
    ids: tuple[int, ...]
    """Token ids of the whole chat, those of the answer as they were drawn."""
    answer_start: int
    """Place in `ids` of the answer's first token."""
    finished: bool
    """Whether the answer ended by itself; else it was cut."""
    text: str = ""
    """What a base model wrote, which has no messages."""


def save_answers(answers: Sequence[Answer], path: Path) -> None:
    """Write chats as one JSON object per line."""
    lines = (json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers)
    write_text(path, "".join(lines))


def read_answers(path: Path) -> list[Answer]:
    """The chats that `save_answers` wrote."""
    with path.open(encoding="utf-8") as file:
        return [answer_from_row(json.loads(line)) for line in file]


def answer_from_row(row: dict[str, Any]) -> Answer:
    """The chat that one JSON object says."""
    return Answer(**row | {"messages": tuple(row["messages"]), "ids": tuple(row["ids"])})


def num_answer_tokens(answers: Sequence[Answer]) -> int:
    """Number of tokens that the model wrote."""
    return sum(len(answer.ids) - answer.answer_start for answer in answers)


def num_chat_tokens(answers: Sequence[Answer]) -> int:
    """Number of tokens of the chats, questions included."""
    return sum(len(answer.ids) for answer in answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAnswers:
    """The dense model's answers in a run: those to fit to, and held-out ones to measure on."""

    fitted: tuple[Answer, ...] = ()
    alike: tuple[Answer, ...] = ()
    """Held out: answers to prompts of the kinds that a fit reads."""
    others: tuple[Answer, ...] = ()
    """Held out: answers to prompts of kinds that no fit reads."""
    alike_penalised: tuple[Answer, ...] = ()
    """Answers to the prompts of `alike`, written with a penalty on repetition: `PENALTY`."""
    others_penalised: tuple[Answer, ...] = ()
    """The same to those of `others`."""
    wanted_tokens: int = 0
    """Tokens of `fitted` that were asked for; there are fewer if the questions ran out."""

    @classmethod
    def load(cls, folder: Path, wanted_tokens: int = 0) -> "OwnAnswers":
        """Read what `OwnAnswers.save` wrote."""
        sets = {}
        for name in _SETS:
            path = folder / f"{name}.jsonl"
            sets[name] = tuple(read_answers(path)) if path.is_file() else ()
        return cls(**sets, wanted_tokens=wanted_tokens)

    def save(self, folder: Path) -> None:
        """Write a file for each set that is not empty."""
        for name in _SETS:
            if answers := getattr(self, name):
                save_answers(answers, folder / f"{name}.jsonl")
