"""The answers of a run: those to fit to, and held-out ones to measure on."""

from collections.abc import Sequence
from typing import Any

from dotmoe.common.errors import UserError
from dotmoe.common.progress import Progress
from dotmoe.models.chat import has_chats, why_not_asked
from dotmoe.models.dense_model import DenseModel
from dotmoe.text.answering import Answering
from dotmoe.text.answers import ALIKE, OTHERS, Answer, OwnAnswers, num_chat_tokens
from dotmoe.text.config import PROMPTS, SELF, DataConfig, asks
from dotmoe.text.questions import ONE_HELDOUT_IN, Question, own_prompts, questions_in, require_chats
from dotmoe.text.writing import PENALTY


def own_answers(
    dense: DenseModel,
    data: DataConfig,
    *,
    identity: str,
    tokens: int,
    heldout: int,
    seed: int,
    first_round: int = 0,
    kept: Sequence[Answer] = (),
    is_number_given: bool = False,
    progress: Progress,
) -> OwnAnswers:
    """The answers of a run: about `tokens` to fit to, and `heldout` of each kind to measure on.

    A run whose data ask nothing fits to none. A base model writes text from nothing, and has none
    to measure on. Another `first_round` draws other answers to fit to. Answers that are `kept` from
    an earlier run are among the `tokens`, so that only as many are written as they lack.
    `is_number_given` says that a user named `tokens`. Raises `UserError` if the data ask a model
    without chat template, or have weights that nothing would follow.
    """
    context = dense.widths.context
    room = min(data.seq_len, context)
    _require_one_weight(data)
    answering = Answering(dense, identity, seed, progress)
    questions = questions_in(data, dense.tokenizer)
    if questions:
        require_chats(dense.tokenizer, data)
        questions = _require_room(answering.with_room(questions, room), room, data)
    itself = SELF in data.data
    fitted = list(kept)
    if questions or itself:
        to_fit = _to_fit(questions, data, progress)
        lacking = tokens - num_chat_tokens(kept)
        fitted += answering.fitted(
            to_fit, lacking, room=room, itself=itself, first_round=first_round
        )
    elif is_number_given:
        progress.log("no row of the data asks: answer_tokens is not used")
    sets = dict[str, tuple[Answer, ...]]()
    if heldout and _can_be_asked(dense.tokenizer, progress):
        sets = _heldout_sets(answering, questions, heldout, seed, context)
    return OwnAnswers(fitted=tuple(fitted), wanted_tokens=tokens, **sets)


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
