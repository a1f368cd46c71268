"""How much a dense model is expected to write in a run, before it writes: see `writing`."""

from dataclasses import dataclass

from dotmoe.common.errors import UserError
from dotmoe.common.numbers import ceil_div
from dotmoe.models.sampling import Sampling
from dotmoe.text import answering, writing
from dotmoe.text.config import PROMPTS, SELF, AnswersConfig, DataConfig
from dotmoe.text.questions import asks_by_name, own_prompts
from dotmoe.text.sources import local_files, opened

QUESTION_TOKENS, ANSWER_TOKENS = 48, 220
"""Mean tokens of a question in its template, and of an answer: of SmolLM2-135M and
Qwen2.5-Coder-0.5B, on the prompts of this package."""
TURN_TOKENS = 120
"""Mean tokens of a user's turn that a model writes itself, assumed: most run to their limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """Texts of one kind that a model writes side by side."""

    what: str
    texts: int
    read: int
    """Tokens before each text: those of a question."""
    written: int
    """Mean tokens of a text."""
    longest: int
    """Tokens of the longest text, for which a batch runs."""
    rows: int
    """Texts that grow at once."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the model generates."""
        return self.texts * self.written

    @property
    def batches(self) -> int:
        """Number of batches."""
        return ceil_div(self.texts, self.rows)


def expected_writing(
    data: DataConfig, how: AnswersConfig, tokens: int, *, is_chat: bool
) -> tuple[Writing, ...]:
    """What a model writes in a run whose fit reads `tokens` tokens; nothing where nothing asks.

    Of a local source the first row is read: if that asks, as many answers as the fit reads are
    counted, though it may hold fewer questions.
    """
    made = list[Writing]()
    tokens = how.answer_tokens or tokens
    if asks_by_name(data):
        made += _chats(data, tokens) if is_chat else [_from_nothing(tokens)]
    elif is_chat and any(map(_begins_with_question, data.data)):
        wanted = _in_portions(tokens, QUESTION_TOKENS + ANSWER_TOKENS)
        made.append(_answers("answers to fit to", wanted))
    if is_chat and how.heldout_answers:
        num_heldout = 2 * 2 * how.heldout_answers  # of two kinds, without and with a penalty
        made.append(_answers("held-out answers", num_heldout))
    return tuple(made)


def _begins_with_question(source: str) -> bool:
    """Whether the first row of a local source asks; False for one that cannot be read here."""
    try:
        if not local_files(source):
            return False
        rows = opened(source, DataConfig(data=(source,)), answered=True)
        first = next(rows, None)
        return first is not None and bool(first.messages)
    except UserError:  # chats with answers need a tokenizer
        return False


def _chats(data: DataConfig, tokens: int) -> list[Writing]:
    """Answers to fit to, and the questions that the model writes once the prompts have run out."""
    questions = 0
    if PROMPTS in data.data:
        asked = own_prompts("asked")
        questions = len([each for each in asked if not each.is_heldout])
    wanted = _in_portions(tokens, QUESTION_TOKENS + ANSWER_TOKENS)
    if SELF not in data.data:
        return [_answers("answers to fit to", min(wanted, writing.ROUNDS * questions))]
    own = max(0, wanted - questions)
    if not own:
        return [_answers("answers to fit to", wanted)]
    turns = _texts("questions", _in_portions(own, 1), 0, TURN_TOKENS, writing.TURNS)
    return [turns, _answers("answers to fit to", wanted)]


def _from_nothing(tokens: int) -> Writing:
    """Texts of a base model, which seldom ends one."""
    longest = writing.FREE.new_tokens
    return _texts("texts to fit to", _in_portions(tokens, 1 + longest), 1, longest, writing.FREE)


def _answers(what: str, texts: int) -> Writing:
    return _texts(what, texts, QUESTION_TOKENS, ANSWER_TOKENS, writing.ANSWERS)


def _texts(what: str, texts: int, read: int, written: int, how: Sampling) -> Writing:
    return Writing(
        what=what,
        texts=texts,
        read=read,
        written=min(written, how.new_tokens),
        longest=how.new_tokens,
        rows=how.rows,
    )


def _in_portions(amount: int, of_each: int) -> int:
    """Number of texts that hold an amount, if so many are written at a time."""
    of_a_portion = answering.AT_ONCE * of_each
    return ceil_div(amount, of_a_portion) * answering.AT_ONCE
