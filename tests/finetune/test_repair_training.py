"""The training of a repair. Oracle: the masked FFN and Adam written out in float64."""

import math

import pytest
import torch
from safetensors.torch import load_file

from dotmoe.common.seeds import generator_for
from dotmoe.method.config import RepairConfig
from dotmoe.method.layout import ALWAYS_ON
from dotmoe.method.repair import repair
from dotmoe.method.repair.ffn_training import FFNTraining
from dotmoe.text.blocks import TokenBlocks
from runs import TINY_CONVERT, TinyRun, passed

ROWS, LENGTH, EPOCHS = 72, 32, 2


@pytest.fixture
def text():
    """Rows of 16 tokens in an order of their own."""
    generator = torch.Generator().manual_seed(5)
    return TokenBlocks(torch.randint(2, 18, (ROWS, LENGTH), generator=generator).int())


@pytest.fixture
def dense(dense_of):
    """A model of one layer; a token is so small in its stream that its weight would be above 10."""
    dense = dense_of("llama", num_hidden_layers=1)
    with torch.no_grad():
        dense.model.model.embed_tokens.weight[2:18] *= 60
        dense.model.model.embed_tokens.weight[7] *= 0.001
    return dense


@torch.no_grad()
def posed(dense, tokens_BT):
    """Inputs of the only FFN, what it gives, and token weights, in float64."""
    layer = dense.model.model.layers[0]
    modules = {"ffn": layer.mlp, "layer": layer}
    seen = passed(modules, lambda: dense.model(input_ids=tokens_BT.long()))
    x_TD, wanted_TD, stream_TD = (
        each.reshape(-1, each.shape[-1]).double() for each in (*seen["ffn"], seen["layer"][1])
    )
    weight_T = 1 / stream_TD.square().mean(1)
    weight_T /= weight_T.sort().values[(len(weight_T) - 1) // 2]
    assert weight_T.max() > 50
    return x_TD, wanted_TD, weight_T.clamp(max=10)


def masked_error(weights, layout, x_TD, wanted_TD, weight_T):
    """Weighted square error of the masked FFN."""
    gate_ND, up_ND, down_DN = weights
    chosen_TK = (x_TD @ layout.router_LED[0].double().T).topk(layout.active_experts).indices
    expert_N = layout.expert_of_neuron_LN[0]
    runs_TN = (chosen_TK[:, :, None] == expert_N).any(1) | (expert_N == ALWAYS_ON)
    hidden_TN = torch.nn.functional.silu(x_TD @ gate_ND.T) * (x_TD @ up_ND.T) * runs_TN
    return ((hidden_TN @ down_DN.T - wanted_TD).square().sum(1) * weight_T).sum()


def trained(weights, layout, given, batch, generator):
    """The weights after Adam with betas 0.9 and 0.99, epsilon 1e-8 and the rates of a repair."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    peaks = [0.02 * float(weight.detach().square().mean().sqrt()) for weight in weights]
    num_tokens = len(given[0])
    steps = EPOCHS * math.ceil(num_tokens / batch)
    warmup = round(steps / 10)
    step = 0
    for _ in range(EPOCHS):
        for row_R in torch.randperm(num_tokens, generator=generator).split(batch):
            error = masked_error(weights, layout, *(each[row_R] for each in given)) / batch
            rate = (step + 1) / warmup
            if step >= warmup:
                rate = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
            step += 1
            grads = torch.autograd.grad(error, weights)
            for weight, grad, mean, square, peak in zip(
                weights, grads, means, squares, peaks, strict=True
            ):
                mean.mul_(0.9).add_(0.1 * grad)
                square.mul_(0.99).add_(0.01 * grad**2)
                size = (square / (1 - 0.99**step)).sqrt() + 1e-8
                weight.data -= rate * peak * mean / (1 - 0.9**step) / size
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("batch", [256, 512])
def test_a_layer_is_trained_by_adam_written_out(
    batch, dense, layout_of, text, tmp_path, monkeypatch
):
    """Steps have 256 tokens; 512 on a long text, as if so many tokens were one."""
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)  # exact products
    layout = layout_of(dense, 6, active_experts=2, shared_size=24)
    is_heldout_T = (torch.arange(ROWS) % 8 == 7).repeat_interleave(LENGTH)
    num_fitted = int((~is_heldout_T).sum())
    if batch == 512:
        monkeypatch.setattr("dotmoe.method.repair.ffn_training._MANY_TOKENS", num_fitted)
    given = posed(dense, text.tokens_BT)
    fitted, heldout = ([each[rows] for each in given] for rows in (~is_heldout_T, is_heldout_T))
    mlp = dense.model.model.layers[0].mlp
    names = ("gate_proj", "up_proj", "down_proj")
    before = [mlp.get_submodule(name).weight.detach().double() for name in names]
    after = trained(before, layout, fitted, batch, generator_for(0, "ffn"))
    errors = [float(masked_error(weights, layout, *heldout)) for weights in (before, after)]

    config = RepairConfig(repair_tokens=ROWS * LENGTH, repair_epochs=EPOCHS)
    (found,) = repair(dense, (layout,), text, config, seed=0, folder=tmp_path)["layers"]
    assert errors[1] < 0.9 * errors[0]
    assert found["heldout_error"] == pytest.approx(errors[1] / errors[0], rel=1e-4)
    written = load_file(tmp_path / "layers.parts/00000_ffn/weights.safetensors")
    for name, own, expected in zip(names, before, after, strict=True):
        change = written[f"model.layers.0.mlp.{name}.weight"].double() - own
        error = (change - 0.8 * (expected - own)).norm() / change.norm()
        assert error < 1e-4, name


@pytest.mark.parametrize("rate", [0.0, -0.05])
def test_a_training_that_leaves_as_much_or_a_little_more_is_dropped(
    rate, dense, layout_of, text, tmp_path, monkeypatch
):
    """Adam at a rate of zero, or a little up the slope; the refit is kept instead."""
    monkeypatch.setattr(
        "dotmoe.method.repair.ffn_training.cosine_with_warmup", lambda *_, **options: rate
    )
    errors, measured = [], FFNTraining.heldout_loss
    monkeypatch.setattr(
        FFNTraining, "heldout_loss", lambda self: errors.append(measured(self)) or errors[-1]
    )
    layout = layout_of(dense, 6, active_experts=2)
    config = RepairConfig(repair_tokens=ROWS * LENGTH, repair_epochs=1)
    (found,) = repair(dense, (layout,), text, config, seed=0, folder=tmp_path)["layers"]
    before, after = errors
    assert before <= after < 1.5 * before
    assert (before == after) == (rate == 0)
    assert found["ridge"]


def test_each_layer_of_each_seed_has_batches_of_its_own(
    dense_of, layout_of, text, tmp_path, monkeypatch
):
    orders, permutation = [], torch.randperm

    def noted(*sizes, **options):
        order = permutation(*sizes, **options)
        orders.append(tuple(order[:20].tolist()))
        return order

    dense = dense_of("llama", num_hidden_layers=3)
    layout = layout_of(dense, 6, active_experts=2)
    monkeypatch.setattr(torch, "randperm", noted)
    config = RepairConfig(repair_tokens=ROWS * LENGTH, repair_epochs=EPOCHS)
    for seed in range(3):
        repair(dense, (layout,), text, config, seed=seed, folder=tmp_path / str(seed))
    assert len(set(orders)) == len(orders) == 3 * 3 * EPOCHS


def test_the_seed_of_a_run_reaches_its_repair(tiny_dense, text_file, tmp_path, monkeypatch):
    seeds = set()

    def noted(seed, *which):
        seeds.add(seed)
        return generator_for(seed, *which)

    monkeypatch.setattr("dotmoe.method.repair.by_layer.generator_for", noted)
    options = TINY_CONVERT | {"data": text_file, "steps": 0, "repair": [], "seed": 3}
    del options["no_repair"]
    TinyRun("convert", tiny_dense("llama"), tmp_path, options | {"repair_tokens": 1000}).made()
    assert seeds == {3}
