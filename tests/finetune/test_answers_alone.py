"""A training on chats learns from answers alone. Oracle: whole logits and `F.cross_entropy`."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from dotmoe.method.config import FinetuneConfig
from dotmoe.method.objective import Objective, taught_by
from dotmoe.text.blocks import TokenBlocks

HOW = FinetuneConfig(steps=1, batch_size=4, micro_batch_size=4, kl_weight=1.0, ce_weight=0.5)


@pytest.fixture(autouse=True)
def _no_routers(monkeypatch):
    """A dense student, whose losses of routers are none."""
    none = nullcontext(dict)
    monkeypatch.setattr("dotmoe.method.objective.router_losses", lambda: none)


@pytest.fixture
def student(dense_of):
    dense = dense_of("llama")
    dense.model.requires_grad_(True)
    return dense


@pytest.fixture
def teacher(dense_of):
    return dense_of("llama", initializer_range=0.03)


def objective(student, teacher, blocks, config=HOW):
    return Objective(student, blocks, config, teacher=partial(taught_by, teacher), seed=0)


@pytest.fixture(name="marks_BT")
def marks(tokens_BT):
    """Answers of other lengths in each row; the first row is an answer to its end."""
    place_T = torch.arange(tokens_BT.shape[1])
    return torch.stack([(place_T > 10), (place_T > 5) & (place_T < 60), place_T > 80, place_T < 7])


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_losses_are_means_over_tokens_of_answers(micro, student, teacher, tokens_BT, marks_BT):
    """Also where micro-batches have other numbers of them, or one has none."""
    marks_BT[3] = False
    blocks = TokenBlocks(tokens_BT.int(), marks_BT)
    how = replace(HOW, micro_batch_size=micro)
    found = objective(student, teacher, blocks, how).accumulate_gradients(0)
    is_counted_BT = marks_BT[:, 1:]
    with torch.no_grad():
        ours_P, theirs_P = (
            model.model(input_ids=tokens_BT).logits[:, :-1][is_counted_BT].double().log_softmax(1)
            for model in (student, teacher)
        )
    labels_P = tokens_BT[:, 1:][is_counted_BT]
    kl = F.kl_div(ours_P, theirs_P, log_target=True, reduction="batchmean")
    assert found["kl"] == pytest.approx(float(kl), rel=1e-4)
    assert found["ce"] == pytest.approx(float(F.nll_loss(ours_P, labels_P)), rel=1e-4)


def test_the_gradient_does_not_depend_on_micro_batches(student, teacher, tokens_BT, marks_BT):
    def gradient(micro):
        student.model.zero_grad()
        blocks = TokenBlocks(tokens_BT.int(), marks_BT)
        how = replace(HOW, micro_batch_size=micro)
        objective(student, teacher, blocks, how).accumulate_gradients(0)
        return torch.cat([each.grad.flatten() for each in student.model.parameters()])

    whole = gradient(4)
    for micro in (1, 2, 3):
        assert (gradient(micro) - whole).norm() < 1e-4 * whole.norm()


def test_what_is_asked_changes_no_gradient(student, teacher, tokens_BT, marks_BT):
    """Oracle: the gradient of the student's logits is zero where no answer is predicted."""
    seen = []
    student.model.model.norm.register_full_backward_hook(lambda *given: seen.append(given[2][0]))
    objective(student, teacher, TokenBlocks(tokens_BT.int(), marks_BT)).accumulate_gradients(0)
    moved_BT = seen[0].abs().sum(2) > 0
    predicts_BT = torch.zeros_like(marks_BT)
    predicts_BT[:, :-1] = marks_BT[:, 1:]
    rows = TokenBlocks(tokens_BT.int(), predicts_BT).answers_in_batch(0, 4, 0)
    assert torch.equal(moved_BT, rows)


def test_marks_on_every_token_change_nothing(student, teacher, tokens_BT):
    plain, marked = (
        objective(student, teacher, TokenBlocks(tokens_BT.int(), marks)).accumulate_gradients(0)
        for marks in (None, torch.zeros(tokens_BT.shape, dtype=torch.bool))
    )
    assert plain == marked
