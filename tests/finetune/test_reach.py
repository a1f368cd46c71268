"""An option reaches what it controls. Oracles: definitions of AdamW, LoRA and eq:router_ste."""

import pytest
import torch
from safetensors.torch import load_file

from dotmoe.method import assignment
from dotmoe.method import calibrate as start
from dotmoe.method.align import Alignment
from dotmoe.method.calibrate import calibrate
from dotmoe.method.config import AlignConfig, AssignmentConfig, CalibrateConfig, FinetuneConfig
from dotmoe.method.finetuning import Finetuning
from dotmoe.method.granularity import Granularity
from dotmoe.method.masked import masked
from dotmoe.training.loop import adamw, global_norm, parameters_of, update
from runs import random_blocks

SMALL = {"batch_size": 2, "micro_batch_size": 2, "lr": 1e-2, "weight_decay": 0.0}
SPLIT = Granularity(num_experts=6, expert_size=16, active_experts=2)


@pytest.fixture(params=["align", "finetune"])
def stepped(request, dense_of, new_student, tiny_dense, blocks):
    """Takes a step with options; the parameters before and after it and their gradients."""

    def take(**options):
        if request.param == "align":
            dense = dense_of("llama")
            state = calibrate(
                dense, blocks, SPLIT, CalibrateConfig(start="random"), AssignmentConfig(), seed=0
            )
            state.router_LED.mul_(20)
            config = AlignConfig(**SMALL | options)
            task = Alignment(dense, blocks, (state,), (SPLIT,), config, AssignmentConfig(), seed=0)
            context = masked(dense, task.maskings)
        else:
            config = FinetuneConfig(**SMALL | options)
            student = new_student(tiny_dense("llama"), config)
            task = Finetuning(student, None, blocks, config, seed=0)
            context = masked(student.dense, [])
        optimizer = adamw(task)
        trained = parameters_of(optimizer)
        parameters = trained | (
            {"router": task.parts[0].router_LED}
            if request.param == "align"
            else dict(student.model.named_parameters())
        )
        with context:
            task.accumulate_gradients(0)
        before = {name: (p.detach().clone(), p.grad) for name, p in parameters.items()}
        norm = global_norm(optimizer)
        squares = [float(grad.square().sum()) for _, grad in before.values() if grad is not None]
        assert float(norm) == pytest.approx(sum(squares) ** 0.5, rel=1e-4)
        update(optimizer, task.schedule.max_grad_norm, norm, 1.0)
        return {name: (*before[name], p.detach()) for name, p in parameters.items()}

    return take


def test_routers_without_a_rate_stay_bit_for_bit_and_count_in_no_norm(stepped):
    found = stepped(lr_router=0.0, weight_decay=0.1)
    assert any("router" in name for name in found)
    for name, (before, grad, after) in found.items():
        assert torch.equal(before, after) == ("router" in name), name
        assert (grad is None) == ("router" in name), name


def test_routers_have_a_rate_of_their_own(stepped):
    for name, (before, grad, after) in stepped(lr_router=0.5, max_grad_norm=1e9).items():
        moved = (after - before)[grad.abs() > 1e-5].abs()  # Adam's first step is the rate itself
        torch.testing.assert_close(
            moved, torch.full_like(moved, 0.5 if "router" in name else 1e-2), rtol=1e-2, atol=0
        )


def test_weight_decay_is_adamws(stepped):
    plain, decayed = stepped(), stepped(weight_decay=0.5)
    for name, (before, _, after) in decayed.items():
        torch.testing.assert_close(
            after - plain[name][2], -1e-2 * 0.5 * before, rtol=1e-3, atol=1e-6
        )


def test_gradients_are_clipped(stepped):
    """To a norm far below AdamW's epsilon, so that next to nothing moves."""
    for before, _, after in stepped(max_grad_norm=1e-13).values():
        assert (after - before).abs().max() < 1e-4 * 1e-2


@pytest.mark.parametrize("rank", [2, 8])
def test_an_adapter_adds_its_product_times_32_over_its_rank(rank, new_student, tiny_dense):
    student = new_student(tiny_dense("llama"), FinetuneConfig(train="lora", lora_rank=rank))
    query = student.model.model.layers[0].self_attn.q_proj
    first, second = query.lora_A["default"].weight, query.lora_B["default"].weight
    with torch.no_grad():
        second.normal_()
        x = torch.randn(3, first.shape[1])
        added = query(x) - query.base_layer(x)
        torch.testing.assert_close(added, 32 / rank * x @ first.T @ second.T, rtol=1e-4, atol=1e-4)


def test_a_seed_draws_the_first_factors_of_adapters(new_student, tiny_dense):
    """Uniform within 1 / sqrt(inputs), as PEFT draws them."""
    folder, config = tiny_dense("llama"), FinetuneConfig(train="lora")
    drawn = []
    for seed in (0, 0, 1):
        trained = new_student(folder, config, seed=seed).trained()
        drawn.append({name: p.detach() for name, p in trained.items() if "lora_A" in name})
    one, again, other = drawn
    for name, factor in one.items():
        assert torch.equal(factor, again[name])
        assert not torch.equal(factor, other[name])
        bound = factor[0].numel() ** -0.5
        assert 0.8 * bound < factor.abs().max() <= bound


@pytest.mark.parametrize("unchosen", ["mean", "zero"])
def test_experts_that_did_not_run_get_the_gradient_that_is_asked_for(
    unchosen, new_student, tiny_dense, layout, blocks
):
    """The mask's gradient is <g, y_e> of chosen experts, then goes through their softmax."""
    plain = {"z_loss_weight": 0.0, "balance_weight": 0.0, "surrogate": "softmax"}
    config = FinetuneConfig(**SMALL | plain, unchosen=unchosen)
    folder = tiny_dense("llama")
    student, seen = new_student(folder, config), {}
    ffn = student.ffns[1]
    ffn.router.register_forward_hook(lambda _, __, logits: seen.update(logits=logits))
    ffn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out))
    ffn.router.register_forward_hook(lambda _, __, logits: logits.retain_grad())
    ffn.register_forward_hook(lambda _, __, out: out.retain_grad())
    Finetuning(student, None, blocks, config, seed=0).accumulate_gradients(0)

    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    gate, up, down = (load_file(folder / "model.safetensors")[name] for name in names)
    x, grad = seen["x"].detach().flatten(0, 1), seen["out"].grad.flatten(0, 1)
    hidden = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    of_expert = [hidden[:, n] @ down[:, n].T for n in layout.neurons_of_expert(1)]
    gains = torch.stack([(y * grad).sum(1) for y in of_expert], dim=1)
    logits = seen["logits"].detach()
    is_chosen = logits >= logits.topk(layout.active_experts, dim=1).values[:, -1:]
    mean = gains.where(is_chosen, 0.0).sum(1, keepdim=True) / layout.active_experts
    of_mask = gains.where(is_chosen, mean if unchosen == "mean" else 0.0)
    soft = logits.softmax(1)
    expected = soft * (of_mask - (soft * of_mask).sum(1, keepdim=True))
    torch.testing.assert_close(seen["logits"].grad, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.usefixtures("all_rounds")
def test_the_start_reads_40_tokens_an_input_as_shares_and_rounds_at_a_hundredth(
    dense_of, monkeypatch
):
    dense, seen, taus = dense_of("llama"), [], []
    blocks = random_blocks(200)
    begin, plan = start.router_aware_start, assignment.balanced_plan

    def remember(x_TD, share_TN, *rest, **named):
        seen.append(share_TN)
        return begin(x_TD, share_TN, *rest, **named)

    def solve(affinity, **named):
        taus.append(named["tau"] / float(affinity.std()))
        return plan(affinity, **named)

    monkeypatch.setattr(start, "router_aware_start", remember)
    monkeypatch.setattr(assignment, "balanced_plan", solve)
    calibrate(dense, blocks, SPLIT, CalibrateConfig(), AssignmentConfig(), seed=0)
    assert taus == pytest.approx([0.01] * 20)
    for share_TN in seen:
        assert 40 * 64 <= len(share_TN) < 40 * 64 + 24
        torch.testing.assert_close(share_TN.sum(dim=1), torch.ones(len(share_TN)))
