"""Out of memory. Oracle: the same run with the micro-batch that fits from the start."""

import logging
from dataclasses import replace

import pytest
import torch
from toy_tasks import SCHEDULE, Regression, warnings_in

from dotmoe.artifacts import AlignState
from dotmoe.data import TokenBlocks
from dotmoe.errors import UserError
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.alignment import AlignConfig, Alignment
from dotmoe.moe.assignment import AssignmentConfig
from dotmoe.moe.surgery import masked
from dotmoe.training.loop import train


class Hungry(Regression):
    """Micro-batches of `size` rows out of 8; more than `fits` do not fit from step 3 on."""

    def __init__(self, size, fits):
        super().__init__()
        self.size, self.fits = size, fits

    def accumulate_gradients(self, step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        self.seen = self.seen + 1
        total = 0.0
        for rows in x.split(self.size):
            loss = (rows @ self.weight - rows.sum(dim=1)).square().sum() / 8
            loss.backward()
            if step >= 3 and self.size > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
            total += loss.item()
        return {"loss": total}

    def halve_micro_batch(self):
        if self.size == 1:
            return None
        self.size //= 2
        return self.size


def test_the_micro_batch_that_fits_is_found_and_said(tmp_path, caplog):
    task, fitting = Hungry(8, 2), Hungry(2, 2)
    with caplog.at_level(logging.WARNING):
        train(task, SCHEDULE, tmp_path)
    (tmp_path / "fitting").mkdir()
    train(fitting, SCHEDULE, tmp_path / "fitting")
    assert warnings_in(caplog) == [
        "out of memory at step 4; micro_batch_size 2 fits and is used from here on"
    ]
    assert torch.allclose(task.weight, fitting.weight, rtol=1e-5)
    assert task.seen == fitting.seen == SCHEDULE.steps  # a failed try leaves no trace


def test_where_nothing_fits_the_options_are_named(tmp_path):
    pattern = r"out of memory at step 4 \(CUDA out of memory. Tried to allocate 2 GiB.\). Lower "
    with pytest.raises(UserError, match=pattern) as error:
        train(Hungry(8, 0), SCHEDULE, tmp_path)
    assert "\n" not in str(error.value)


class Stubborn(Regression):
    def accumulate_gradients(self, step):
        raise torch.OutOfMemoryError("no")


def test_a_task_that_cannot_do_with_less_says_so(tmp_path):
    with pytest.raises(UserError, match=r"out of memory at step 1 \(no\)"):
        train(Stubborn(), SCHEDULE, tmp_path)


class Cramped(Alignment):
    """The backward pass of more than two sequences does not fit."""

    def differentiate(self, loss):
        if self.micro_batch_size > 2:
            raise torch.OutOfMemoryError("too much")
        super().differentiate(loss)


def test_the_alignment_goes_on_with_half_the_micro_batch(tiny_dense, tmp_path):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))
    widths = dense.widths
    initial = AlignState(
        affinity_LNE=torch.randn(widths.layers, widths.ffn, 12),
        router_LED=0.2 * torch.randn(widths.layers, 12, widths.model),
        step=0,
    )
    blocks = TokenBlocks(torch.randint(2, 258, (10, 24), dtype=torch.int32))
    ends = []
    for kind, size in ((Cramped, 4), (Alignment, 2)):
        config = AlignConfig(batch_size=4, micro_batch_size=size)
        task = kind(
            dense, blocks, initial, 3, config, AssignmentConfig(), warmup_steps=2, seed=0
        )  # fmt: skip
        folder = tmp_path / kind.__name__
        folder.mkdir()
        with masked(dense, task.masking):
            train(task, replace(SCHEDULE, steps=3), folder)
        assert task.micro_batch_size == 2
        ends.append((task.affinity_LNE, task.router_LED, task.masking.expert_of_neuron_LN))
    for cramped, fitting in zip(*ends, strict=True):
        assert torch.equal(cramped, fitting)
