"""Losses and gradients of a batch. Oracles: a teacher run by itself, and autograd over its sum."""

import pytest
import torch
import torch.nn.functional as F

from dotmoe.finetune.config import FinetuneConfig
from dotmoe.finetune.student import Student
from dotmoe.finetune.task import Finetuning
from dotmoe.load import LoadConfig, load_dense

CONFIG = FinetuneConfig(
    batch_size=4,
    micro_batch_size=4,
    kl_weight=0.7,
    ce_weight=0.4,
    balance_weight=0.3,
    z_loss_weight=0.2,
)
WEIGHTS = {"kl": 0.7, "ce": 0.4, "balance": 0.3, "z": 0.2}


@pytest.fixture
def task(tiny_dense, layout, blocks):
    """A student whose weights are no longer its teacher's."""
    student, teacher = (load_dense(str(tiny_dense("llama")), LoadConfig()) for _ in range(2))
    task = Finetuning(Student(student, layout, CONFIG, seed=0), teacher, blocks, CONFIG, seed=0)
    with torch.no_grad():
        for parameter in task.student.trained().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return task


def expected_losses(task):
    """Every loss of the first batch, from the whole logits of two plain forward passes."""
    tokens = task.blocks.batch(0, 4, 0)
    task.student.routing.want_losses()
    logits = task.student.model(input_ids=tokens).logits
    z, balance = task.student.routing.take_losses()
    with torch.no_grad():
        wanted = task.teacher.model(input_ids=tokens).logits.log_softmax(-1)
    found = logits.log_softmax(-1)
    kl = F.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return {"kl": kl, "ce": ce, "z": z, "balance": balance}


def test_the_gradient_is_that_of_the_weighted_sum_of_all_losses(task):
    metrics = task.accumulate_gradients(0)
    gradients = {name: p.grad.clone() for name, p in task.student.trained().items()}
    losses = expected_losses(task)
    for name, value in losses.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-4)
    total = sum(weight * losses[name] for name, weight in WEIGHTS.items())
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-4)
    assert losses["kl"] > 0.01
    task.student.zero_grad()
    total.backward()
    for name, parameter in task.student.trained().items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)
