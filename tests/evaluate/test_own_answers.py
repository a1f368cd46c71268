"""Closeness on own answers. Oracles: whole logits of each chat alone, `F.kl_div`, stock argmax."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dotmoe.measure.evaluate import own_answers
from dotmoe.measure.evaluate.own_answers import (
    ends_by_penalty,
    measure_closeness,
    share_that_ends,
    states_of,
)
from dotmoe.text.answers import Answer, OwnAnswers


def answer(length, start, seed):
    ids = torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Answer(messages=(), kind="", ids=tuple(ids), answer_start=start, finished=True)


ANSWERS = [answer(30, 10, 0), answer(55, 20, 1), answer(12, 11, 2), answer(55, 3, 3)]


@torch.no_grad()
def alone(dense, other, each):
    """KL, agreement and log-probabilities of one answer's tokens, without a batch."""
    ids = torch.tensor([each.ids])
    ours, theirs = (
        model(input_ids=ids).logits[0].double().log_softmax(1) for model in (dense, other)
    )
    places = slice(each.answer_start - 1, len(each.ids) - 1)
    ours, theirs, labels = ours[places], theirs[places], ids[0, each.answer_start :, None]
    kl = F.kl_div(theirs, ours, log_target=True, reduction="none").sum(1)
    same = ours.argmax(1) == theirs.argmax(1)
    return kl, same, ours.gather(1, labels) - theirs.gather(1, labels)


def test_only_answer_tokens_count_and_each_once(dense_of):
    teacher, other = dense_of("llama"), dense_of("llama", initializer_range=0.03).model
    dense, states = teacher.model, states_of(teacher, ANSWERS)
    found = measure_closeness(states, other, ANSWERS)
    kls, sames, lost = (
        torch.cat(part) for part in zip(*(alone(dense, other, a) for a in ANSWERS), strict=True)
    )
    assert found["tokens"] == len(kls) == sum(len(a.ids) - a.answer_start for a in ANSWERS)
    assert found["kl"] == pytest.approx(float(kls.mean()), rel=1e-5)
    assert found["top1"] == pytest.approx(float(sames.double().mean()))
    assert found["times_dense"] == pytest.approx(float(lost.mean().exp()), rel=1e-5)
    assert found["answer_kls"][2] == pytest.approx(
        float(alone(dense, other, ANSWERS[2])[0]), rel=1e-4
    )


def test_a_model_beside_itself_loses_nothing(dense):
    found = measure_closeness(states_of(dense, ANSWERS), dense.model, ANSWERS)
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    assert found["top1"] == found["times_dense"] == 1


def test_answers_that_reach_an_end_are_counted_beside_the_dense_models(dense, monkeypatch):
    greedy = replace(own_answers.ANSWERS, temperature=0.0, new_tokens=4)
    monkeypatch.setattr(own_answers, "ANSWERS", greedy)
    question = [answer(30, 10, 5)]
    first, second = stock_greedy(dense.model, question[0].ids[:10], 2)
    assert first != second  # else the case below would be that of an empty answer
    found = share_that_ends(dense.model, dense.tokenizer, question, seed=0)
    assert (found["ended"], found["dense_ended"], found["more_unfinished"]) == (0, 1, 1)
    dense.tokenizer.eos_token_id = second
    found = share_that_ends(dense.model, dense.tokenizer, question, seed=0)
    assert (found["ended"], found["more_unfinished"], found["empty"]) == (1, 0, 0)


def test_a_model_that_ends_its_turn_at_once_answers_nothing(dense, monkeypatch):
    greedy = replace(own_answers.ANSWERS, temperature=0.0, new_tokens=4)
    monkeypatch.setattr(own_answers, "ANSWERS", greedy)
    (first,) = stock_greedy(dense.model, ANSWERS[0].ids[:10], 1)
    dense.tokenizer.eos_token_id = first
    found = share_that_ends(dense.model, dense.tokenizer, ANSWERS[:1], seed=0)
    assert (found["ended"], found["more_unfinished"], found["empty"]) == (0, 1, 1)


def test_answers_are_tried_with_a_penalty_on_repetition(dense, monkeypatch):
    greedy = replace(own_answers.ANSWERS, temperature=0.0, new_tokens=40)
    monkeypatch.setattr(own_answers, "ANSWERS", greedy)
    question = [answer(30, 10, 5)]
    prompt = list(question[0].ids[:10])
    free = stock_greedy(dense.model, prompt, 40)
    ids = torch.tensor([prompt])
    made = dense.model.generate(
        ids, max_new_tokens=40, do_sample=False, eos_token_id=None, repetition_penalty=1.1
    )
    only_with_penalty = [token for token in made[0, 10:].tolist() if token not in free]
    dense.tokenizer.eos_token_id = only_with_penalty[-1]
    asked = dense.model, dense.tokenizer, question
    assert share_that_ends(*asked, seed=0)["answer_ends"] == [0]
    found = share_that_ends(*asked, seed=0, repetition_penalty=1.1)
    assert (found["answer_ends"], found["repetition_penalty"]) == ([1], 1.1)


def test_with_a_penalty_each_model_is_beside_the_dense_one_with_it(dense, monkeypatch, tmp_path):
    greedy = replace(own_answers.ANSWERS, temperature=0.0, new_tokens=40)
    monkeypatch.setattr(own_answers, "ANSWERS", greedy)
    plain, penalised = answer(30, 10, 5), replace(answer(30, 10, 5), finished=False)
    own = OwnAnswers(alike=(plain,), alike_penalised=(penalised,))
    taught = own_answers.states_on(dense, own)
    found = own_answers.on_own_answers(taught, dense.tokenizer, {"moe": dense.folder}, own, seed=0)[
        "moe"
    ]["alike"]
    assert (found["dense_ended"], found["with_penalty"]["dense_ended"]) == (1, 0)
    assert found["with_penalty"]["repetition_penalty"] == 1.1
    without = replace(own, alike_penalised=())  # a run of an earlier version
    (values,) = own_answers.on_own_answers(
        taught, dense.tokenizer, {"moe": dense.folder}, without, seed=0
    )["moe"].values()
    assert "with_penalty" not in values


def test_a_penalty_is_advised_where_it_ends_more_answers_than_chance_would():
    def closeness(plain, penalised):
        return {"alike": {"answer_ends": plain, "with_penalty": {"answer_ends": penalised}}}

    gained = closeness([0] * 8 + [1] * 8, [1] * 16)
    assert "50 % of its answers end, 100 % with repetition_penalty 1.1" in ends_by_penalty(gained)
    assert ends_by_penalty(closeness([1] * 16, [1] * 16)) is None
    assert ends_by_penalty(closeness([1] * 16, [0] * 16)) is None
    # Three of 16, one less: a gain of 2 with an error of about 2.
    assert ends_by_penalty(closeness([0] * 3 + [1] * 13, [1] * 15 + [0])) is None
    assert ends_by_penalty({}) is None
    assert ends_by_penalty({"alike": {"kl": 0.1}}) is None


@torch.no_grad()
def stock_greedy(model, prompt, tokens):
    """The most likely continuation, each token from whole logits."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
