"""Out of memory. Oracle: the same run with the micro-batch that fits from the start."""

import logging
from dataclasses import replace

import pytest
import torch
from toy_tasks import SCHEDULE, Regression, warnings_in

from dotmoe.align import AlignConfig, Alignment
from dotmoe.data import TokenBlocks
from dotmoe.errors import UserError
from dotmoe.granularity import Granularity
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.assignment import AlignState, AssignmentConfig
from dotmoe.moe.masked import masked
from dotmoe.training.loop import TrainingConfig, train


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


def test_moments_that_do_not_fit_are_explained(tmp_path, monkeypatch):
    """AdamW's moments are allocated before the first step, and its own work can be too much."""

    def refuse(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore")

    with monkeypatch.context() as patch:
        patch.setattr("torch.optim.AdamW.step", refuse)
        with pytest.raises(UserError, match=r"out of memory in the optimizer at step 1 \(CUDA out"):
            train(Regression(), SCHEDULE, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("torch.zeros_like", refuse)
        with pytest.raises(UserError, match="out of memory for the moments of AdamW"):
            train(Regression(), SCHEDULE, tmp_path)


class Cramped(Alignment):
    """The backward pass of more than two sequences does not fit, and step 2 is interrupted."""

    interrupted_at = None

    def differentiate(self, loss, *, is_last):
        if self.micro_batch_size > 2:
            raise torch.OutOfMemoryError("too much")
        super().differentiate(loss, is_last=is_last)

    def begin(self, step):
        if step == self.interrupted_at:
            raise KeyboardInterrupt
        return super().begin(step)


def test_the_alignment_goes_on_with_half_the_micro_batch_also_when_resumed(tiny_dense, tmp_path):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))
    widths = dense.widths
    initial = AlignState(
        affinity_LNE=torch.randn(widths.layers, widths.ffn, 12),
        router_LED=0.2 * torch.randn(widths.layers, 12, widths.model),
        step=0,
    )
    split = Granularity(num_experts=12, expert_size=widths.ffn // 12, active_experts=3)
    blocks = TokenBlocks(torch.randint(2, 258, (10, 24), dtype=torch.int32))

    def trained(kind, size, folder, interrupted_at=None):
        config = AlignConfig(batch_size=4, micro_batch_size=size)
        task = kind(
            dense, blocks, initial, split, config, AssignmentConfig(), warmup_steps=2, seed=0
        )
        task.interrupted_at = interrupted_at
        folder.mkdir(exist_ok=True)
        with masked(dense, task.routing):
            every = TrainingConfig(checkpoint_every=1)
            train(task, replace(SCHEDULE, steps=3), folder, every)
        assert task.micro_batch_size == 2
        learned = task.learned(initial, 3)
        return learned.affinity_LNE, learned.router_LED, task.routing.expert_of_neuron_LN

    fitting = trained(Alignment, 2, tmp_path / "fitting")
    cramped = trained(Cramped, 4, tmp_path / "cramped")
    with pytest.raises(KeyboardInterrupt):
        trained(Cramped, 4, tmp_path / "cut", interrupted_at=2)
    resumed = trained(Alignment, 4, tmp_path / "cut")  # it would fit now, with another balance loss
    for others in (cramped, resumed):
        for one, other in zip(fitting, others, strict=True):
            assert torch.equal(one, other)
