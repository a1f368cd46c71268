"""Own answers: what the dense model is asked, its answers, and the files that keep both.

A chat model never writes books or encyclopedias. What is fitted to such text loses its answers, so
the dense model writes the text that it is fitted to (docs/guides/text.md).
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, TextIO, TypeVar

from filelock import FileLock, Timeout

from dotmoe.common.errors import UserError
from dotmoe.common.files import write_text
from dotmoe.common.numbers import ceil_div
from dotmoe.common.progress import Progress, Update, no_update
from dotmoe.models.chat import (
    Message,
    asked,
    end_tokens,
    has_chats,
    user_opening,
    why_not_asked,
)
from dotmoe.models.family import DenseModel
from dotmoe.models.identity import cached_in
from dotmoe.models.sampling import Continuation, Sampling, continuations
from dotmoe.text.config import DataConfig
from dotmoe.text.sources import PROMPTS, SELF, asks, local_files, opened

Kept = TypeVar("Kept")

ONE_HELDOUT_IN = 8
"""One prompt in so many is held out: its answers are measured on and never fitted."""
ANSWERS = Sampling()
"""How a model answers: as its makers advise for most."""
PENALTY = 1.1
"""Penalty on repetition with which held-out questions are answered too, for a damaged model repeats
itself; as the makers of Qwen2.5 advise."""
TURNS = Sampling(temperature=1.0, top_k=100, new_tokens=96)
"""How a model writes the user's turns: with more variety than its answers, and shorter."""
FREE = Sampling(temperature=1.0, top_k=1_000)
"""How a base model writes from nothing."""
ALIKE, OTHERS = "alike", "others"
"""Held-out answers to prompts of the kinds that a fit reads; and of kinds that no fit reads."""
AT_ONCE = 128
"""Questions that are answered before the tokens are counted."""
_SETS = (ALIKE, OTHERS, f"{ALIKE}_penalised", f"{OTHERS}_penalised", "fitted")
"""Names of the sets of answers of a run, and of their files."""
_SHORTEST_TURN = 4  # tokens
_SENTENCE_END = re.compile("[.?!](?=\\s)|\n|[\u3002\uff1f\uff01]")
"""The last three are Chinese and Japanese."""
ROUNDS = 4
"""How often the same prompts are answered, if that takes to get the tokens."""


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


# --- questions ---------------------------------------------------------------------------------


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
            text = text.strip() if turn.finished else _whole_sentences(text)
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


# --- answers -----------------------------------------------------------------------------------


def write_answers(
    dense: DenseModel,
    questions: Sequence[Question],
    path: Path,
    how: Sampling,
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

    def made(new: Continuation) -> Answer:
        asking, prompt = questions[new.number], prompts[new.number]
        return _answer(tokenizer, asking, prompt, new.ids, new.finished)

    return _written(dense, prompts, path, how, made, seed=seed, room=room, on_progress=on_progress)


def _written(
    dense: DenseModel,
    prompts: Sequence[Sequence[int]],
    path: Path,
    how: Sampling,
    made: Callable[[Continuation], Answer],
    *,
    seed: int,
    room: int | None,
    on_progress: Update,
) -> list[Answer]:
    """Continue prompts, and write what is `made` of each, in their order.

    Those that are made are kept in `PATH.parts`; what is drawn for a prompt does not depend on the
    others, so that a stopped process's texts are those of one that was not stopped.
    """
    parts = path.with_name(path.name + ".parts")
    done = dict(_rows_of(parts))
    left = [number for number in range(len(prompts)) if number not in done]
    before = len(done)
    growing = continuations(
        dense.model,
        [prompts[number] for number in left],
        how,
        end_tokens(dense.model, dense.tokenizer),
        seed=seed,
        numbers=left,
        room=room or dense.widths.context,
        on_closed=lambda closed: on_progress(before + closed, len(prompts)),
    )
    with parts.open("a", encoding="utf-8") as file:
        for new in growing:
            done[new.number] = made(new)
            _append(file, new.number, done[new.number])
    answers = [done[number] for number in range(len(prompts))]
    save_answers(answers, path)
    parts.unlink()
    return answers


def _append(file: TextIO, number: int, answer: Answer) -> None:
    """Write an answer with its number at the end of a file, so that a stopped process has it."""
    row = {"number": number} | asdict(answer)
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def save_answers(answers: Sequence[Answer], path: Path) -> None:
    """Write chats as one JSON object per line."""
    lines = (json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers)
    write_text(path, "".join(lines))


def read_answers(path: Path) -> list[Answer]:
    """The chats that `save_answers` wrote."""
    with path.open(encoding="utf-8") as file:
        return [_from_row(json.loads(line)) for line in file]


def num_answer_tokens(answers: Sequence[Answer]) -> int:
    """Number of tokens that the model wrote."""
    return sum(len(answer.ids) - answer.answer_start for answer in answers)


def num_chat_tokens(answers: Sequence[Answer]) -> int:
    """Number of tokens of the chats, questions included."""
    return sum(len(answer.ids) for answer in answers)


def _answer(
    tokenizer: Any, asking: Question, prompt: list[int], new: list[int], finished: bool
) -> Answer:
    text = tokenizer.decode(new[:-1] if finished else new)
    messages = (*asking.messages, {"role": "assistant", "content": text})
    ids = (*prompt, *new)
    return Answer(
        messages=messages, kind=asking.kind, ids=ids, answer_start=len(prompt), finished=finished
    )


def _rows_of(parts: Path) -> Iterator[tuple[int, Answer]]:
    """Numbers and answers that a stopped process wrote, without a line that it did not finish."""
    if not parts.is_file():
        return
    whole, _, rest = parts.read_bytes().rpartition(b"\n")
    if rest:
        parts.write_bytes(whole + b"\n" if whole else b"")
    for line in whole.splitlines():
        row = json.loads(line)
        yield row.pop("number"), _from_row(row)


def _from_row(row: dict[str, Any]) -> Answer:
    return Answer(**row | {"messages": tuple(row["messages"]), "ids": tuple(row["ids"])})


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

    def made(new: Continuation) -> Answer:
        return Answer(
            messages=(),
            kind=SELF,
            ids=(start, *new.ids),
            answer_start=1,
            finished=new.finished,
            text=tokenizer.decode(new.ids, skip_special_tokens=True),
        )

    prompts = [[start]] * num_texts
    return _written(dense, prompts, path, FREE, made, seed=seed, room=None, on_progress=on_progress)


# --- the answers of a run ----------------------------------------------------------------------


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
    asked: int = 0
    """Tokens of `fitted` that were asked for; there are fewer if the questions ran out."""

    @classmethod
    def load(cls, folder: Path, asked: int = 0) -> "OwnAnswers":
        """Read what `OwnAnswers.save` wrote."""
        sets = {}
        for name in _SETS:
            path = folder / f"{name}.jsonl"
            sets[name] = tuple(read_answers(path)) if path.is_file() else ()
        return cls(**sets, asked=asked)

    def save(self, folder: Path) -> None:
        """Write a file for each set that is not empty."""
        for name in _SETS:
            if answers := getattr(self, name):
                save_answers(answers, folder / f"{name}.jsonl")


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
        self._cache = cached_in("answers")

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
        how = replace(ANSWERS, repetition_penalty=repetition_penalty)

        def write(path: Path) -> list[Answer]:
            with self._progress.bar(title) as update:
                return write_answers(
                    self._dense, questions, path, how, seed=seed, room=room, on_progress=update
                )

        asked_for = [question.messages for question in questions]
        return self._cached((seed, asked_for, room, asdict(how)), write, read_answers)

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

        return self._cached((seed, num_texts, asdict(FREE)), write, read_answers)

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

        return self._cached((seed, num_turns, asdict(TURNS)), write, read)

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
        rounds = 1 if itself else ROUNDS
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
        """What `write` wrote for this key, here or in an earlier run."""
        text = json.dumps([self._identity, key], sort_keys=True, ensure_ascii=False)
        name = sha256(text.encode()).hexdigest()
        path = self._cache / f"{name}.jsonl"
        lock = FileLock(self._cache / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._progress.log("another process writes the same answers: they are waited for")
            lock.acquire()
        try:
            return read(path) if path.is_file() else write(path)
        finally:
            lock.release()


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


def own_answers(
    dense: DenseModel,
    data: DataConfig,
    *,
    identity: str,
    tokens: int,
    heldout: int,
    seed: int,
    first_round: int = 0,
    is_number_given: bool = False,
    progress: Progress,
) -> OwnAnswers:
    """The answers of a run: about `tokens` to fit to, and `heldout` of each kind to measure on.

    A run whose data ask nothing fits to none. A base model writes text from nothing, and has none
    to measure on. Another `first_round` draws other answers to fit to. `is_number_given` says that
    a user named `tokens`. Raises `UserError` if the data ask a model without chat template, or have
    weights that nothing would follow.
    """
    itself = SELF in data.data
    context = dense.widths.context
    room = min(data.seq_len, context)
    _require_one_weight(data)
    questions = questions_in(data, dense.tokenizer)
    if questions:
        require_chats(dense.tokenizer, data)
    elif is_number_given and not itself:
        progress.log("no row of the data asks: answer_tokens is not used")
    answering = Answering(dense, identity, seed, progress)
    if questions:
        questions = _require_room(answering.with_room(questions, room), room, data)
    fitted = list[Answer]()
    if questions or itself:
        to_fit = _to_fit(questions, data, progress)
        fitted = answering.fitted(to_fit, tokens, room=room, itself=itself, first_round=first_round)
    sets = dict[str, tuple[Answer, ...]]()
    if heldout and _can_be_asked(dense.tokenizer, progress):
        sets = _heldout_sets(answering, questions, heldout, seed, context)
    return OwnAnswers(fitted=tuple(fitted), asked=tokens, **sets)


def _require_one_weight(data: DataConfig) -> None:
    """Refuse weights that tell `self` from `prompts`, which are asked in turn."""
    weights = dict(zip(data.data, data.data_weights or (), strict=False))
    if len({weight for source, weight in weights.items() if asks(source)}) > 1:
        raise UserError(
            f"data_weights differ for {SELF} and {PROMPTS}, but the model goes on with questions "
            "of its own where the prompts end. Give both one weight: together they say how many of "
            "the tokens are answers."
        )


def _to_fit(questions: Sequence[Question], data: DataConfig, progress: Progress) -> list[Question]:
    """The questions whose answers are fitted to: those of no set to measure on."""
    of_others = {each.words for each in own_prompts("heldout")}
    found = [each for each in questions if not each.is_heldout and each.words not in of_others]
    if questions and not found and SELF not in data.data:
        raise UserError(
            f"all {len(questions)} questions of {', '.join(data.data)} are held out to measure on, "
            f"as one in {ONE_HELDOUT_IN} is: none is left to fit to. Add questions."
        )
    num_measured = len([each for each in questions if each.words in of_others])
    if num_measured:
        progress.log(
            f"{num_measured} questions are those that every run is measured on: they are not "
            "fitted to"
        )
    return found


def _can_be_asked(tokenizer: Any, progress: Progress) -> bool:
    """Whether a model answers questions; says why it does not."""
    why = why_not_asked(tokenizer) if has_chats(tokenizer) else "the model has no chat template"
    if why is None:
        return True
    progress.log(f"nothing is measured on held-out answers: {why}")
    return False


def _heldout_sets(
    answering: Answering, questions: Sequence[Question], heldout: int, seed: int, room: int
) -> dict[str, tuple[Answer, ...]]:
    """Answers to measure on by the name of their set: without, then with the penalty.

    At most `heldout` answers in a set, each in a chat of at most `room` tokens. Without `questions`
    the prompts of this package are asked.
    """
    like_the_fitted = questions or own_prompts("asked")
    alike = [each for each in like_the_fitted if each.is_heldout]
    others = own_prompts("heldout")
    chosen = {
        ALIKE: _some(answering.with_room(alike, room), heldout),
        OTHERS: _some(answering.with_room(others, room), heldout),
    }
    sets = dict[str, tuple[Answer, ...]]()
    title = "held-out answers"
    for name, each in chosen.items():
        sets[name] = tuple(answering.answers(each, seed, title, room=room))
    title = f"{title}, repetition penalty {PENALTY:g}"
    for name, each in chosen.items():
        penalised = answering.answers(each, seed, title, room=room, repetition_penalty=PENALTY)
        sets[f"{name}_penalised"] = tuple(penalised)
    return sets


def _require_room(questions: list[Question], room: int, data: DataConfig) -> list[Question]:
    """The questions, or a `UserError` if none leaves room for an answer."""
    if not questions:
        raise UserError(
            f"no question of {', '.join(data.data)} leaves room for an answer in {room} tokens "
            "(--seq-len, or the model's context). Raise --seq-len, or ask less."
        )
    return questions


def _some(questions: Sequence[Question], most: int) -> list[Question]:
    """At most `most` questions, evenly from the whole, so of all kinds."""
    taken = min(most, len(questions))
    return [questions[place * len(questions) // taken] for place in range(taken)]
