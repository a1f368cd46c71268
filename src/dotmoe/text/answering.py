"""A dense model that is asked until there are answers enough, and a cache of what it writes."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from dotmoe.common.cache import cache_folder, cached_in
from dotmoe.common.files import in_turn, sha256_of, write_text
from dotmoe.common.numbers import ceil_div
from dotmoe.common.progress import Progress
from dotmoe.models.chat import asked, end_tokens, has_chats
from dotmoe.models.dense_model import DenseModel
from dotmoe.text import writing
from dotmoe.text.answers import Answer, num_chat_tokens, read_answers
from dotmoe.text.questions import Question
from dotmoe.text.writing import own_turns, write_answers, write_continuations

Kept = TypeVar("Kept")
_ANSWERS = "answers"
"""Folder of the cache."""
AT_ONCE = 128
"""Questions that are answered before the tokens are counted."""


class Answering:
    """A dense model that is asked; its answers are cached, so that another run finds them.

    `identity` is the fingerprint of the model.
    """

    def __init__(self, dense: DenseModel, identity: str, seed: int, progress: Progress) -> None:
        self._dense = dense
        self._seed = seed
        self._progress = progress
        dtype = next(dense.model.parameters()).dtype
        ends = sorted(end_tokens(dense.model, dense.tokenizer))
        self._identity = f"{identity} {dtype}, ends {ends}"

    def answers(
        self,
        questions: Sequence[Question],
        seed: int,
        title: str,
        *,
        room: int,
        repetition_penalty: float = 1.0,
    ) -> list[Answer]:
        """Answers to questions; a chat has at most `room` tokens."""
        sampling = replace(writing.ANSWERS, repetition_penalty=repetition_penalty)

        def write(path: Path) -> list[Answer]:
            with self._progress.bar(title) as update:
                return write_answers(
                    self._dense, questions, path, sampling, seed=seed, room=room, on_progress=update
                )

        asked_for = [question.messages for question in questions]
        return self._cached((seed, asked_for, room, asdict(sampling)), write, read_answers)

    def with_room(self, questions: Sequence[Question], room: int) -> list[Question]:
        """The questions that leave room for an answer in so many tokens; says how many do not."""
        fitting = [
            each for each in questions if len(asked(self._dense.tokenizer, each.messages)) < room
        ]
        if left_out := len(questions) - len(fitting):
            self._progress.log(
                f"{left_out} of {len(questions)} questions are left out: each has {room} tokens or "
                "more, which leaves no room for an answer"
            )
        return fitting

    def continuations(self, num_texts: int, seed: int, title: str) -> list[Answer]:
        """Texts of a base model."""

        def write(path: Path) -> list[Answer]:
            with self._progress.bar(title) as update:
                return write_continuations(
                    self._dense, num_texts, path, seed=seed, on_progress=update
                )

        return self._cached((seed, num_texts, asdict(writing.FREE)), write, read_answers)

    def turns(self, num_turns: int, seed: int) -> list[Question]:
        """User's turns that the model writes."""

        def write(path: Path) -> list[Question]:
            with self._progress.bar("questions that the model writes itself") as update:
                turns = own_turns(self._dense, num_turns, seed, update)
            write_text(path, json.dumps([asdict(turn) for turn in turns], ensure_ascii=False))
            return turns

        def read(path: Path) -> list[Question]:
            rows = json.loads(path.read_text(encoding="utf-8"))
            return [Question(messages=tuple(row["messages"]), kind=row["kind"]) for row in rows]

        return self._cached((seed, num_turns, asdict(writing.TURNS)), write, read)

    def fitted(
        self,
        questions: Sequence[Question],
        tokens: int,
        *,
        room: int,
        itself: bool,
        first_round: int = 0,
    ) -> list[Answer]:
        """Answers with about `tokens` tokens, chats included: to the questions, then to others.

        With `itself` the model goes on with questions of its own; else the same ones are answered
        again, at most four times, by other draws. Another `first_round` draws anew. A chat has at
        most `room` tokens.
        """
        found = list[Answer]()
        portions = self._portions(questions, first_round, itself=itself)
        while (done := num_chat_tokens(found)) < tokens:
            title = f"own answers ({done:,} of {tokens:,} tokens)"
            if not has_chats(self._dense.tokenizer):
                seed = self._seed_of(first_round + len(found) // AT_ONCE)
                found += self.continuations(AT_ONCE, seed, title)
                continue
            seed, portion = next(portions, (0, []))
            if not portion:
                break
            found += self.answers(portion, seed, title, room=room)
        return found

    def _portions(
        self, questions: Sequence[Question], first_round: int, *, itself: bool
    ) -> Iterator[tuple[int, list[Question]]]:
        """Some questions at a time, of all kinds, with the seed of their answers."""
        mixed = random.Random(0).sample(questions, len(questions))
        rounds = 1 if itself else writing.ROUNDS
        for number in range(first_round, first_round + rounds):
            portions = ceil_div(len(mixed), AT_ONCE)  # of one size: a few rows are as slow as many
            for portion in range(portions):
                yield self._seed_of(number), mixed[portion::portions]
        if not itself:
            return
        for number in count(first_round + rounds):
            seed = self._seed_of(number)
            yield seed, self.turns(AT_ONCE, seed)

    def _seed_of(self, number: int) -> int:
        return 1_000 * self._seed + number

    def _cached(
        self, key: Any, write: Callable[[Path], Kept], read: Callable[[Path], Kept]
    ) -> Kept:
        """What `write` wrote for this key, here or in an earlier run; damaged, it is made again."""
        text = json.dumps([self._identity, key], sort_keys=True, ensure_ascii=False)
        name = sha256(text.encode()).hexdigest()
        path = cache_folder() / _ANSWERS / f"{name}.jsonl"
        if (kept := _kept(path, read)) is not None:  # the cache may be read-only
            return kept
        cached_in(_ANSWERS)
        waiting = "another process writes the same answers: they are waited for"
        with in_turn(path.with_suffix(".lock"), lambda: self._progress.log(waiting)):
            if (kept := _kept(path, read)) is not None:
                return kept
            if path.is_file():
                self._progress.log(f"{path} is damaged: it is written again")
            for partial in path.parent.glob(f".{path.name}.*.partial"):  # of one that was killed
                partial.unlink()
            made = write(path)
            write_text(_checksum_of(path), sha256_of(path))
            return made


def _kept(path: Path, read: Callable[[Path], Kept]) -> Kept | None:
    """What a file of the cache holds; None if it is not there, or damaged."""
    if not path.is_file():
        return None
    with suppress(ValueError, KeyError, TypeError):
        if _is_whole(path):
            return read(path)
    return None


def _checksum_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    """Whether a file of the cache is as it was written; one without a checksum is older."""
    checksum = _checksum_of(path)
    if not checksum.is_file():
        return path.stat().st_size > 0
    return checksum.read_text(encoding="utf-8") == sha256_of(path)
