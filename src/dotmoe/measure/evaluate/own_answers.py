"""Closeness to the dense model on held-out answers that it wrote itself."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from dotmoe.common.files import Values
from dotmoe.common.progress import Update, no_update
from dotmoe.common.tables import Table, percent, table_of
from dotmoe.measure.evaluate.difference import error_of_mean, error_over, nats_with_error
from dotmoe.method.losses import head_of
from dotmoe.models.chat import end_tokens
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hf_config import readout_of
from dotmoe.models.load import load_weights
from dotmoe.models.sampling import continuations
from dotmoe.models.scoring import hidden_states, logits_in_parts
from dotmoe.models.traits import Readout
from dotmoe.text.answers import ALIKE, OTHERS, Answer, OwnAnswers
from dotmoe.text.writing import ANSWERS, PENALTY

_TOKENS_AT_ONCE = 4096
KINDS_SHOWN = {ALIKE: "prompts as fitted", OTHERS: "other prompts"}
"""What tables call the two sets of held-out answers."""
_NOT_FITTED = "usual prompts"


class _Sums(NamedTuple):
    """Sums over the tokens of one answer."""

    kl: float
    same: int
    """Tokens at which both models have the same most likely one."""
    dense_nats: float
    """Cross-entropy of the answer under the dense model."""
    other_nats: float
    tokens: int


class DenseStates(NamedTuple):
    """What the dense model says of each answer's tokens, without the model."""

    hidden: list[Tensor]
    """Of each answer, the head's inputs that predict its tokens: [T, D]."""
    head: Any
    """From these to the head's product; it stays when the weights leave memory."""
    readout: Readout


@torch.no_grad()
def states_of(dense: DenseModel, answers: Sequence[Answer]) -> DenseStates:
    """The dense model's states on answers; they stay when its weights leave memory."""
    hidden = dict[int, Tensor]()
    for numbers in _batches(answers):
        states = _predicting(dense.model, [answers[number] for number in numbers])
        hidden.update(zip(numbers, states, strict=True))
    ordered = [hidden[number] for number in range(len(answers))]
    model: Any = dense.model
    head: Any = model.get_output_embeddings()
    if dense.weights == "memory":  # else the module reads its weight from disk, again and again
        head = partial(linear, weight=head_of(dense).detach())
    return DenseStates(ordered, head, readout_of(dense.config))


def states_on(dense: DenseModel, own: OwnAnswers) -> dict[str, DenseStates]:
    """`states_of` both sets of held-out answers, by name, of those that there are."""
    sets = {name: getattr(own, name) for name in (ALIKE, OTHERS)}
    return {name: states_of(dense, answers) for name, answers in sets.items() if answers}


def closeness_on(
    taught: Mapping[str, DenseStates], model: Any, own: OwnAnswers, on_progress: Update = no_update
) -> dict[str, Values]:
    """`measure_closeness` of a model on both sets of held-out answers, by name.

    `like_fit` of the first set is False if the model was fitted to no answers: its prompts are
    those that a conversion without text is fitted to.
    """
    found = {
        kind: measure_closeness(states, model, getattr(own, kind), on_progress)
        for kind, states in taught.items()
    }
    if ALIKE in found and not own.fitted:
        found[ALIKE]["like_fit"] = False
    return found


@torch.no_grad()
def measure_closeness(
    dense: DenseStates, other: Any, answers: Sequence[Answer], on_progress: Update = no_update
) -> Values:
    """How close a model is to the dense one, teacher forced over answers of the dense one.

    Returns:
        `kl`, the mean of KL(dense || other) over answer tokens in nats, and `kl_stderr` over
        answers; `answer_kls` and `answer_tokens` of each answer, to pair two models; `top1`, the
        share of tokens with the same most likely one, and `top1_stderr` over answers;
        `times_dense`, the ratio of perplexities of the answers; numbers of `answers` and `tokens`.
    """
    of_answer = dict[int, _Sums]()
    for numbers in _batches(answers):
        states = _predicting(other, [answers[number] for number in numbers])
        for number, other_TD in zip(numbers, states, strict=True):
            of_answer[number] = _compared(dense, number, other, other_TD, answers[number])
        on_progress(len(of_answer), len(answers))
    rows = [of_answer[number] for number in range(len(answers))]
    counts = [row.tokens for row in rows]
    total = sum(counts)
    means = [row.kl / row.tokens for row in rows]
    shares = [row.same / row.tokens for row in rows]
    lost = sum(row.other_nats - row.dense_nats for row in rows)
    return {
        "kl": sum(row.kl for row in rows) / total,
        "kl_stderr": error_over(means, counts),
        "top1": sum(row.same for row in rows) / total,
        "top1_stderr": error_over(shares, counts),
        "times_dense": math.exp(lost / total),
        "answers": len(rows),
        "tokens": total,
        "answer_kls": [round(mean, 6) for mean in means],
        "answer_tokens": counts,
    }


def _batches(answers: Sequence[Answer]) -> Iterator[list[int]]:
    """Numbers of answers of similar length, a few thousand tokens together."""
    batch = list[int]()
    for number in sorted(range(len(answers)), key=lambda number: len(answers[number].ids)):
        if batch and (len(batch) + 1) * len(answers[number].ids) > _TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _predicting(model: Any, answers: Sequence[Answer]) -> Iterator[Tensor]:
    """The head's inputs that predict each answer's tokens, [T, D].

    Shorter chats are filled up behind their end, where nothing reads.
    """
    longest = max(len(answer.ids) for answer in answers)
    tokens_BT = torch.tensor([[*a.ids, *[0] * (longest - len(a.ids))] for a in answers])
    hidden_BTD = hidden_states(model, tokens_BT[:, :-1])
    for row, answer in enumerate(answers):
        yield hidden_BTD[row, answer.answer_start - 1 : len(answer.ids) - 1].clone()


def _compared(
    dense: DenseStates, number: int, other: Any, other_TD: Tensor, answer: Answer
) -> _Sums:
    """Sums over the tokens of one answer."""
    label_T = torch.tensor(answer.ids[answer.answer_start :], device=other_TD.device)
    same = 0
    kl, dense_nats, other_nats = 0.0, 0.0, 0.0
    for part, other_TV in logits_in_parts(other, other_TD):
        dense_TV = dense.readout.logits(dense.head(dense.hidden[number][part]))
        dense_log_TV, other_log_TV = dense_TV.log_softmax(1), other_TV.log_softmax(1)
        kl += float((dense_log_TV.exp() * (dense_log_TV - other_log_TV)).sum())
        same += int((dense_TV.argmax(1) == other_TV.argmax(1)).sum())
        label_T1 = label_T[part, None]
        dense_nats -= float(dense_log_TV.gather(1, label_T1).sum())
        other_nats -= float(other_log_TV.gather(1, label_T1).sum())
    return _Sums(kl, same, dense_nats, other_nats, len(label_T))


def share_that_ends(
    model: Any,
    tokenizer: Any,
    answers: Sequence[Answer],
    seed: int,
    on_progress: Update = no_update,
    repetition_penalty: float = 1.0,
) -> Values:
    """Share of the questions that a model answers to an end, by the draws of the dense model.

    An answer without text does not count: a damaged model ends its turn at once.

    Returns `ended`, and `dense_ended`, the share of the dense model's `answers`; their difference
    `more_unfinished` with its standard error `more_unfinished_stderr` over questions; `empty`, the
    share of answers without text; `answer_ends` of each answer, 1 or 0; the longest answer,
    `new_tokens`; and the `repetition_penalty`, which must be that of the dense model's answers.
    """
    prompts = [answer.ids[: answer.answer_start] for answer in answers]
    ends = end_tokens(model, tokenizer)
    sampling = replace(ANSWERS, repetition_penalty=repetition_penalty)
    room = int(model.config.max_position_embeddings)
    ended = dict[int, int]()
    num_empty = 0
    for made in continuations(model, prompts, sampling, ends, seed=seed, room=room):
        says_something = _says_something(tokenizer, made.ids, ends)
        ended[made.number] = 1 if made.is_finished and says_something else 0
        if not says_something:
            num_empty += 1
        on_progress(len(ended), len(prompts))
    num_answers = len(answers)
    answer_ends = [ended[number] for number in range(num_answers)]
    dense_ends = [dense_end(tokenizer, answer, ends) for answer in answers]
    lost = [dense - own for dense, own in zip(dense_ends, answer_ends, strict=True)]
    return {
        "ended": sum(answer_ends) / num_answers,
        "answer_ends": answer_ends,
        "dense_ended": sum(dense_ends) / num_answers,
        "empty": num_empty / num_answers,
        "more_unfinished": sum(lost) / num_answers,
        "more_unfinished_stderr": error_of_mean(lost),
        "new_tokens": sampling.new_tokens,
        "repetition_penalty": repetition_penalty,
    }


def dense_end(tokenizer: Any, answer: Answer, ends: set[int]) -> int:
    """1 if an answer of the dense model has text and an end, else 0."""
    says_something = _says_something(tokenizer, answer.ids[answer.answer_start :], ends)
    return 1 if answer.finished and says_something else 0


def _says_something(tokenizer: Any, ids: Sequence[int], ends: set[int]) -> bool:
    """Whether an answer has text beside control tokens and blanks."""
    said = [token for token in ids if token not in ends]
    return bool(tokenizer.decode(said, skip_special_tokens=True).strip())


def on_own_answers(
    taught: Mapping[str, DenseStates],
    tokenizer: Any,
    exports: Mapping[str, Path],
    own: OwnAnswers,
    seed: int,
    on_progress: Update = no_update,
) -> Values:
    """`measure_closeness` of each export, by its name, on the sets of held-out answers.

    `taught` are the dense model's states on these, its weights need not be in memory. The last
    export also answers the questions itself (see `share_that_ends`), and again with a penalty on
    repetition, as the dense model did, in `with_penalty`. `seed` is that of the dense answers.
    """
    known_TD = next(iter(taught.values())).hidden[0]
    results = dict[str, Values]()
    for name, folder in exports.items():
        model: Any = load_weights(folder, known_TD.dtype).to(known_TD.device)
        results[name] = closeness_on(taught, model, own, on_progress)
        if name == list(exports)[-1]:
            for kind in taught:
                results[name][kind] |= _ends(model, tokenizer, own, kind, seed, on_progress)
        del model  # free it before the next one is loaded
    return results


def _ends(
    model: Any, tokenizer: Any, own: OwnAnswers, kind: str, seed: int, on_progress: Update
) -> Values:
    """Which answers to one set of questions end; and with a penalty, if the dense model tried."""
    ends = share_that_ends(model, tokenizer, getattr(own, kind), seed, on_progress)
    penalised = getattr(own, f"{kind}_penalised")
    if penalised:
        ends["with_penalty"] = share_that_ends(
            model, tokenizer, penalised, seed, on_progress, repetition_penalty=PENALTY
        )
    return ends


def worse_set(closeness: Mapping[str, Values]) -> Values:
    """The closeness on that set of answers on which fewer top tokens are the dense model's."""
    return min(closeness.values(), key=lambda values: float(values["top1"]))


def kind_shown(kind: str, values: Values) -> str:
    """What tables call a set of held-out answers, on which a model has these `values`."""
    if values.get("like_fit", True):  # measurements of other versions lack it
        return KINDS_SHOWN[kind]
    return _NOT_FITTED


def own_answers_table(results: Mapping[str, Values]) -> Table:
    """Table of exports, by name, on held-out answers of the dense model; see `on_own_answers`."""
    rows = [
        values | {"model": name, "kind": kind_shown(kind, values)}
        for name, each in results.items()
        for kind, values in each.items()
    ]
    return table_of(
        rows,
        {
            "model": lambda row: row["model"],
            "held-out answers to": lambda row: row["kind"],
            "KL per token": lambda row: nats_with_error(row["kl"], row["kl_stderr"], ".3f"),
            "same top token": lambda row: percent(row["top1"]),
            "times dense": lambda row: f"{row['times_dense']:.3f}",
            "answers that end": _shown_ends,
            f"with penalty {PENALTY:g}": _shown_ends_with_penalty,
        },
        title="On answers that the dense model wrote itself",
        note="KL(dense || model) in nats per answer token. Answers that end: the share that "
        f"has text and ends within {ANSWERS.new_tokens} tokens, and after 'of' the dense model's. "
        f"Penalty: the same with repetition_penalty {PENALTY:g}, which servers read from "
        "generation_config.json.",
    )


def _shown_ends(row: Values) -> str | None:
    if "ended" not in row:
        return None
    return f"{percent(row['ended'])} of {percent(row['dense_ended'])}"


def _shown_ends_with_penalty(row: Values) -> str | None:
    return _shown_ends(row["with_penalty"]) if "with_penalty" in row else None


def ends_by_penalty(closeness: Mapping[str, Values]) -> str | None:
    """A sentence, if more answers end with a penalty on repetition: by more than two errors."""
    plain, penalised = list[int](), list[int]()
    for values in closeness.values():
        if "with_penalty" not in values:
            return None
        plain += values["answer_ends"]
        penalised += values["with_penalty"]["answer_ends"]
    gained = [after - before for before, after in zip(plain, penalised, strict=True)]
    error = error_of_mean(gained)
    if error is None or fmean(gained) <= 2 * error:
        return None
    return (
        f"{percent(fmean(plain))} of its answers end, {percent(fmean(penalised))} "
        f"with repetition_penalty {PENALTY:g} (in generation_config.json)."
    )
