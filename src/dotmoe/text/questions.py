"""What the dense model is asked: prompts of this package, and rows of the user's files."""

import json
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

from dotmoe.common.errors import UserError
from dotmoe.models.chat import Message, has_chats
from dotmoe.text.config import PROMPTS, SELF, DataConfig, asks
from dotmoe.text.sources import local_files, opened

ONE_HELDOUT_IN = 8
"""One prompt in so many is held out: its answers are measured on and never fitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A chat that ends with the user's turn."""

    messages: tuple[Message, ...]
    kind: str = ""
    """What it asks for, such as `maths`."""

    @property
    def is_heldout(self) -> bool:
        """Whether answers to it are for measuring: decided by its words, so alike in every run."""
        return sha256(self.words.encode()).digest()[0] % ONE_HELDOUT_IN == 0

    @property
    def words(self) -> str:
        """What is said, and by whom: questions of the same words are one."""
        said = [{name: each.get(name) for name in ("content", "role")} for each in self.messages]
        return json.dumps(said, sort_keys=True, ensure_ascii=False)


def question(prompt: str, kind: str = "") -> Question:
    """A question of one user's message."""
    return Question(messages=({"role": "user", "content": prompt},), kind=kind)


def own_prompts(name: str) -> list[Question]:
    """Prompts of this package: `asked`, to fit to, or `heldout`, of kinds that no fit reads."""
    text = files("dotmoe.text").joinpath(f"prompts/{name}.jsonl").read_text(encoding="utf-8")
    rows = (json.loads(line) for line in text.splitlines())
    return [question(row["prompt"], row["kind"]) for row in rows]


def questions_in(data: DataConfig, tokenizer: Any) -> list[Question]:
    """The prompts of this package, if `prompts` is a source, and rows of local files that ask.

    One that comes twice is asked once. Raises `UserError` for weights that nothing would follow.
    """
    found = list[Question]()
    for source in data.data:
        if source == PROMPTS:
            found += own_prompts("asked")
        elif source != SELF and local_files(source):
            read = opened(source, data, tokenizer, answered=True)
            asking = [Question(messages=each.messages) for each in read if each.messages]
            if asking and data.data_weights:
                raise UserError(
                    f"data_weights divide tokens between texts, and between them and {SELF} or "
                    f"{PROMPTS}, but rows of {source} ask the model. Leave --data-weights out."
                )
            found += asking
    return list({each.words: each for each in found}.values())


def asks_by_name(data: DataConfig) -> bool:
    """Whether names of sources ask the dense model to write, as they do where none is named."""
    return not data.data or any(map(asks, data.data))


def require_chats(tokenizer: Any, data: DataConfig) -> None:
    """Refuse to ask a model that has no chat template."""
    if not has_chats(tokenizer):
        raise UserError(
            f"{', '.join(data.data)} asks, but the model has no chat template, so it answers "
            "nothing. Give it text: --data FILE."
        )
