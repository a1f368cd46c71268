"""The alignment phase. Oracles: the dense model, and the whole loss written out plainly."""

import contextlib
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dotmoe.common.errors import UserError
from dotmoe.method.align import Alignment, align
from dotmoe.method.config import AlignConfig, AssignmentConfig
from dotmoe.method.extract import extract
from dotmoe.method.granularity import Granularity
from dotmoe.method.masked import masked
from dotmoe.method.state import AlignState
from dotmoe.method.transport import balanced_plan, greedy_assignment, sinkhorn
from runs import loaded, random_blocks

E, K = 12, 3
CONFIG = AlignConfig(steps=6, batch_size=4, micro_batch_size=4, lr=1e-2, max_epochs=100.0)


@pytest.fixture
def blocks():
    return random_blocks(10)


def random_state(dense, columns=E):
    widths = dense.widths
    generator = torch.Generator().manual_seed(1)
    return AlignState(
        affinity_LNE=torch.randn(widths.layers, widths.ffn, columns, generator=generator),
        router_LED=0.2 * torch.randn(widths.layers, E, widths.model, generator=generator),
    )


def split_of(dense, **options):
    size = dense.widths.ffn // E
    return Granularity(num_experts=E, expert_size=size, active_experts=K, **options)


def alignment(dense, blocks, config=CONFIG, *, kind=Alignment, split=None, **assignment):
    split = split or split_of(dense)
    start = random_state(dense, columns=split.columns)
    return kind(dense, blocks, (start,), (split,), config, AssignmentConfig(**assignment), seed=0)


def gradients(dense, blocks, config=CONFIG, **options):
    """Metrics of a first step, and the gradients of affinities and routers."""
    task = alignment(dense, blocks, config, tau_start=0.5, **options)
    with masked(dense, task.maskings):
        metrics = task.accumulate_gradients(0)
    return metrics, task.parts[0].affinity_LNE.grad, task.parts[0].router_LED.grad


class WrittenOutFFN(torch.nn.Module):
    """eq:moe_output with eq:assignment_ste and eq:router_ste, every product materialised."""

    def __init__(self, mlp, plan_NE, room_F, router_ED, losses):
        super().__init__()
        self.mlp, self.plan, self.room = mlp, plan_NE, room_F
        self.router, self.losses = router_ED, losses

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        logits = flat @ self.router.T
        soft = logits.softmax(dim=1)
        hard = F.one_hot(logits.topk(K, dim=1).indices, E).sum(dim=1).float()
        routing = hard + soft - soft.detach()
        columns = len(self.room)
        always = torch.ones(len(flat), columns - E)
        expert = greedy_assignment(self.plan.detach(), capacity=self.room)
        assignment = F.one_hot(expert, columns).float() + self.plan - self.plan.detach()
        hidden = F.silu(self.mlp.gate_proj(flat)) * self.mlp.up_proj(flat)
        mask = torch.einsum("te,ne->tn", torch.cat([routing, always], dim=1), assignment)
        z = logits.logsumexp(dim=1).square().mean()
        balance = E * (hard.mean(dim=0) * soft.mean(dim=0)).sum()
        self.losses.append(1e-3 * z + 1e-2 * balance)
        return self.mlp.down_proj(hidden * mask).view(x.shape)


@pytest.mark.parametrize("room", [[8] * E, [5] * E + [36]])
def test_gradients_are_those_of_the_whole_loss_written_out(room, dense, blocks):
    config = replace(CONFIG, surrogate="softmax")
    split = Granularity(
        num_experts=E, expert_size=room[0], active_experts=K, shared_size=sum(room[E:])
    )
    metrics, affinity_grad, router_grad = gradients(dense, blocks, config, split=split)
    state = random_state(dense, columns=len(room))
    affinity = state.affinity_LNE.requires_grad_()
    router = state.router_LED.requires_grad_()
    tokens = blocks.batch(0, 4, 0)
    target = dense.model(input_ids=tokens).logits.flatten(0, 1).detach()
    losses = []
    layers = dense.model.model.layers
    originals = [layer.mlp for layer in layers]
    for index, layer in enumerate(layers):
        solved = sinkhorn(affinity[index].double(), capacity=room, tau=0.5, num_sweeps=400)
        layer.mlp = WrittenOutFFN(layer.mlp, solved.entries.float(), room, router[index], losses)
    logits = dense.model(input_ids=tokens).logits
    for layer, original in zip(layers, originals, strict=True):
        layer.mlp = original
    flat = logits.flatten(0, 1)
    kl = F.kl_div(
        flat.log_softmax(1), target.log_softmax(1), log_target=True, reduction="batchmean"
    )
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss = 2 * kl + ce + sum(losses) / len(losses)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert torch.allclose(router_grad, router.grad, rtol=1e-3, atol=1e-6)
    scale = affinity.grad.abs().max()
    assert (affinity_grad - affinity.grad).abs().max() < 1e-3 * scale


def test_micro_batches_add_up_to_the_batch(dense, blocks):
    # Load balancing counts tokens per micro-batch, so it is left out of the comparison.
    even = replace(CONFIG, balance_weight=0.0)
    whole = gradients(dense, blocks, even)
    parts = gradients(dense, blocks, replace(even, micro_batch_size=3))
    # Cross-entropy has one unlabelled position a row, the same in each part.
    for one, other in zip(whole[1:], parts[1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_leading_dense_layers_are_neither_trained_nor_measured(dense, blocks, tmp_path):
    """Nor decayed: their part of the state comes back as it was, and metrics are of the others."""
    split, metrics = split_of(dense, first_dense_layers=1), {}
    task = alignment(dense, blocks, split=split)
    (final,), initial = align(task, tmp_path, on_step=metrics.__setitem__), task.parts[0].initial
    for before, after in ((initial.affinity_LNE, final.affinity_LNE),
                          (initial.router_LED, final.router_LED)):  # fmt: skip
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[1], after[1])
    plan = balanced_plan(initial.affinity_LNE[1], capacity=split.expert_size, tau=1.0).entries
    hard = F.one_hot(greedy_assignment(plan, capacity=split.expert_size), E)
    gap = float((plan - hard).abs().sum(dim=-1).mean() / 2)
    assert metrics[1]["soft_hard_gap"] == pytest.approx(gap, abs=1e-5)
    moved = [each["moved_fraction"] * split.units for each in metrics.values()]
    assert moved[0] == 0 < sum(moved)
    assert moved[1] == pytest.approx(round(moved[1]), abs=1e-3)


def test_activation_checkpointing_changes_no_gradient(dense, blocks, tmp_path):
    ffn = dense.model.model.layers[0].mlp

    def learned(checkpointing):
        config, runs = replace(CONFIG, activation_checkpointing=checkpointing), []
        folder = tmp_path / str(checkpointing)
        folder.mkdir()
        with ffn.register_forward_pre_hook(lambda *_: runs.append(True)):
            (state,) = align(alignment(dense, blocks, config), folder)
            return state, len(runs)

    (kept, runs), (recomputed, more_runs) = learned(False), learned(True)
    assert (runs, more_runs) == (2 * CONFIG.steps, 3 * CONFIG.steps)
    assert torch.equal(kept.affinity_LNE, recomputed.affinity_LNE)
    assert torch.equal(kept.router_LED, recomputed.router_LED)


@pytest.mark.parametrize(("kl_weight", "passes"), [(2.0, 2), (0.0, 1)])
def test_a_teacher_that_teaches_nothing_does_not_run(kl_weight, passes, dense, blocks):
    runs = []
    with dense.model.model.layers[0].register_forward_pre_hook(lambda *_: runs.append(True)):
        metrics, _, router_grad = gradients(dense, blocks, replace(CONFIG, kl_weight=kl_weight))
    assert len(runs) == passes
    assert (metrics["kl"] > 0) == (kl_weight > 0)
    assert router_grad.abs().max() > 0


def test_what_takes_time_has_the_name_of_its_part(dense, blocks, monkeypatch):
    """For PyTorch's profiler, and for `benchmarks/alignment_step.py`."""
    names, within, seen = [], [], set()

    @contextlib.contextmanager
    def watch(name):
        names.append(name)
        within.append(name)
        yield
        within.pop()

    def watched(called, plain, *given, **named):
        seen.add((called, within[-1]))
        return plain(*given, **named)

    for called in (
        *("objective.hidden_states", "objective.distillation_loss"),
        *("align.assignment_plan", "align.rounded"),
    ):
        path = f"dotmoe.method.{called}"
        monkeypatch.setattr(path, partial(watched, called, resolve_name(path)))
    monkeypatch.setattr("torch.profiler.record_function", watch)
    gradients(dense, blocks)
    assert seen == {
        ("objective.hidden_states", "dense forward"),
        ("objective.hidden_states", "student forward"),
        ("objective.distillation_loss", "head and losses"),
        ("align.assignment_plan", "assignment solve"),
        ("align.rounded", "rounding"),
    }
    assert {*names} - {part for _, part in seen} == {"backward", "assignment gradient"}


def test_the_split_stays_while_its_router_learns(dense, blocks, tmp_path):
    task = alignment(dense, blocks, replace(CONFIG, learn_assignment=False))
    (final,), initial = align(task, tmp_path), task.parts[0].initial
    assert torch.equal(initial.affinity_LNE, final.affinity_LNE)
    assert not torch.equal(initial.router_LED, final.router_LED)
    layout = extract(initial, split_of(dense), AssignmentConfig())
    assert torch.equal(task.parts[0].masking.expert_of_neuron_LN, layout.expert_of_neuron_LN)


def test_steps_are_limited_by_the_passes_over_the_data():
    config = AlignConfig(steps=3500, batch_size=64, max_epochs=4.0)
    assert [config.schedule(blocks).steps for blocks in (1_000_000, 160, 1)] == [3500, 10, 1]
    assert config.schedule(160).warmup_steps == 2  # a share of what is taken
    assert replace(config, steps=0).schedule(160).steps == 0
    assert replace(config, max_epochs=None).schedule(1).steps == 3500


def test_the_temperature_falls_linearly_and_then_stays():
    config = AssignmentConfig(tau_start=1.0, tau_end=0.1)
    taus = [config.tau(step, 700) for step in range(1000)]
    assert taus == pytest.approx(np.interp(range(1000), [0, 700], [1.0, 0.1]), rel=1e-12)
    assert config.tau(0, 0) == 0.1


def test_the_solver_starts_from_the_step_before_in_units_of_affinity(dense, blocks):
    """Where nothing has moved, one pass sees that, or by a machine's arithmetic a second one."""
    (part,) = alignment(dense, blocks).parts
    first = part.plan(0.2)
    assert first.num_passes > 4
    assert part.plan(0.2).num_passes <= 2
    torch.testing.assert_close(part.potential_LE, 0.2 * first.potential, atol=1e-6, rtol=1e-6)


def test_bfloat16_weights_train_float32_affinities_and_routers(tiny_dense, blocks):
    """Mixed precision: the frozen model in 16 bits, what is learned and the losses in 32."""
    folder = str(tiny_dense("llama", dtype="bfloat16"))
    runs = {}
    for dtype in ("float32", "bfloat16"):
        runs[dtype] = gradients(loaded(folder, dtype=dtype), blocks)
    exact, mixed = runs["float32"], runs["bfloat16"]
    assert mixed[1].dtype == mixed[2].dtype == torch.float32
    assert mixed[0]["ce"] == pytest.approx(exact[0]["ce"], rel=0.02)
    for one, other in zip(exact[1:], mixed[1:], strict=True):
        assert F.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.7


def test_routers_in_the_models_dtype_route_as_plain_bfloat16_does(tiny_dense, blocks):
    dense = loaded(tiny_dense("llama"), dtype="bfloat16")
    task = alignment(dense, blocks, replace(CONFIG, router_dtype="model"))
    (part,) = task.parts
    with masked(dense, task.maskings):
        task.accumulate_gradients(0)
        task.begin(0)
    router_ED = part.router_LED[1].detach().bfloat16()
    assert torch.equal(router_ED.float(), part.router_LED[1])
    x_TD = torch.randn(5000, 64, dtype=torch.bfloat16)
    mask_TE, *_ = part.masking.of_layer(1, x_TD)
    values, _ = (x_TD @ router_ED.T).sort(dim=1, descending=True)
    is_tied = values[:, K - 1] == values[:, K]
    assert 0.001 < is_tied.float().mean() < 0.2  # float32 has none
    lowest = torch.where(mask_TE > 0, (x_TD @ router_ED.T).float(), torch.inf).amin(1)
    assert torch.equal(lowest, values[:, K - 1].float())
    assert task.learned()[0].router_LED.dtype == torch.float32


def test_adams_moments_of_bfloat16_routers_are_float32(tiny_dense, blocks, tmp_path):
    """Oracle: AdamW written out in float64, its weights rounded to bfloat16 at every step.

    With moments in bfloat16 the mean of squares only grows: 0.999 of it rounds back to it.
    """
    dense = loaded(tiny_dense("llama"), dtype="bfloat16")
    config = replace(CONFIG, router_dtype="model", max_grad_norm=1e9, weight_decay=0.1)
    task = alignment(dense, blocks, config)
    (part,), seen = task.parts, []
    end = task.end

    def remember():
        end()
        seen.append(part.router_LED.grad.double())

    task.end = remember
    weight = part.router_LED.detach().bfloat16().double()
    (final,) = align(task, tmp_path)
    mean = square = torch.zeros(())
    warmup = task.schedule.warmup_steps
    for step, grad in enumerate(seen, 1):
        is_rising, whole = step <= warmup, config.steps - warmup
        rate = step / warmup if is_rising else (1 + np.cos(np.pi * (step - 1 - warmup) / whole)) / 2
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        move = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = weight - config.lr * rate * (0.1 * weight + move)
        weight = weight.bfloat16().double()
    found = final.router_LED.double()
    assert torch.equal(found, found.bfloat16().double())
    assert len(seen) == config.steps
    off = (found - weight).abs() / weight.abs()
    assert off.max() < 2**-7  # a number on the edge between two may go to either
    assert (off > 0).double().mean() < 0.01


def test_float16_is_refused(tiny_dense, blocks, tmp_path):
    dense = loaded(tiny_dense("llama"), dtype="float16")
    with pytest.raises(UserError, match=r"float16.*--dtype bfloat16"):
        align(alignment(dense, blocks), tmp_path)
