"""The start from data. Oracles: planted clusters, NumPy's least squares, the dense model."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dotmoe.common.errors import UserError
from dotmoe.method.assignment import assigned
from dotmoe.method.calibrate import (
    RidgeRouter,
    block_inputs,
    calibrate,
    contributions,
    log_energy,
    router_aware_start,
)
from dotmoe.method.config import AssignmentConfig, CalibrateConfig
from dotmoe.method.dense_layers import num_leading_outliers, pruning_errors
from dotmoe.method.granularity import Granularity
from dotmoe.text.blocks import TokenBlocks
from runs import GRANITE_FACTORS, passed


def planted(seed, groups):
    """Inputs of 4 topics, the topic of each token, and the group of each of 8 neurons a group."""
    generator = torch.Generator().manual_seed(seed)
    topic_T = torch.randint(4, (400,), generator=generator)
    x_TD = F.one_hot(topic_T, 8).float() + 0.1 * torch.randn(400, 8, generator=generator)
    truth_N = torch.arange(groups).repeat(8)[torch.randperm(8 * groups, generator=generator)]
    return x_TD, topic_T, truth_N, generator


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_planted_experts_are_found_with_the_router_that_runs_them(seed):
    x_TD, topic_T, truth_N, generator = planted(seed, 4)
    energy_TN = (topic_T[:, None] == truth_N) + 0.1 * torch.rand(400, 32, generator=generator)
    split = Granularity(num_experts=4, expert_size=8, active_experts=1)
    expert_N, router_ED = router_aware_start(
        x_TD, energy_TN, split, CalibrateConfig(), AssignmentConfig(), generator
    )
    for expert in range(4):
        assert len(set(truth_N[expert_N == expert].tolist())) == 1
    expert_of_topic = torch.stack([expert_N[truth_N == topic][0] for topic in range(4)])
    assert torch.equal((x_TD @ router_ED.T).argmax(dim=1), expert_of_topic[topic_T])


@pytest.mark.parametrize("rounds", [0, 10])
def test_the_neurons_of_largest_energy_start_in_the_shared_expert(rounds, monkeypatch):
    monkeypatch.setattr("dotmoe.method.calibrate.START_ROUNDS", rounds)
    is_strong, generator = torch.arange(32) % 4 == 0, torch.Generator().manual_seed(0)
    x_TD, energy_TN = (torch.rand(90, width, generator=generator) for width in (6, 32))
    energy_TN += 5 * is_strong
    split = Granularity(num_experts=6, expert_size=4, active_experts=2, shared_size=8)
    expert_N, _ = router_aware_start(
        x_TD, energy_TN, split, CalibrateConfig(), AssignmentConfig(), generator
    )
    assert torch.equal(expert_N == 6, is_strong)


def test_the_shared_expert_takes_what_no_router_can_predict():
    x_TD, topic_T, truth_N, generator = planted(0, 5)
    energy_TN = 5.0 * (topic_T[:, None] == truth_N)  # 1.25 in the mean
    by_chance = truth_N == 4
    energy_TN[:, by_chance] = 2 * torch.rand(400, 8, generator=generator)  # 1 in the mean
    split = Granularity(num_experts=4, expert_size=8, active_experts=1, shared_size=8)
    expert_N, _ = router_aware_start(
        x_TD, energy_TN, split, CalibrateConfig(), AssignmentConfig(), generator
    )
    assert torch.equal(expert_N == 4, by_chance)
    assert torch.bincount(expert_N).tolist() == [8] * 5


@pytest.mark.parametrize("outlier", [1.0, 1e4])
def test_the_router_is_numpys_ridge_regression_up_to_scale(outlier):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    x[:, 2] *= outlier  # as the channels of massive activations
    energy = torch.rand(300, 4, generator=generator)
    router = RidgeRouter(x, 1e-7)(log_energy(energy)).numpy()

    x = x.double().numpy()
    size = np.log(np.sqrt(energy.double().numpy()))
    target = size - size.mean(axis=1, keepdims=True)
    penalty = 1e-7 * np.mean(np.sum(x**2, axis=0))
    stacked = np.vstack([x, np.sqrt(penalty) * np.eye(6)])
    oracle = np.linalg.lstsq(stacked, np.vstack([target, np.zeros((6, 4))]), rcond=None)[0].T
    oracle = oracle - oracle.mean(axis=0)
    oracle /= (x @ oracle.T).std(ddof=1)
    np.testing.assert_allclose(router, oracle, rtol=1e-5, atol=1e-9)


def test_what_no_router_can_be_fitted_to_is_refused_with_the_remedy():
    with pytest.raises(UserError, match=r"ridge is 1e-30.* 4 tokens.*Raise ridge"):
        RidgeRouter(torch.ones(4, 8), 1e-30)  # singular without rounding
    with pytest.raises(UserError, match="--dtype float32"):
        RidgeRouter(torch.full((5, 8), torch.inf), 0.01)


def test_a_layer_that_overflows_float16_is_refused_by_its_number(dense_of):
    dense = dense_of("llama")
    ffn = dense.family.ffn(dense.family.layers(dense.model)[1])
    for part in (ffn.gate, ffn.up):
        part.weight.data[3] *= 1e4
    dense.model.half()
    tokens_BT = torch.randint(2, 258, (4, 64), generator=torch.Generator().manual_seed(0))
    split = Granularity(num_experts=12, expert_size=8, active_experts=3)
    rules = CalibrateConfig(), AssignmentConfig()
    for compute in (
        lambda: calibrate(dense, TokenBlocks(tokens_BT.int()), split, *rules, seed=0),
        lambda: pruning_errors(dense, tokens_BT, 0.75),
    ):
        with pytest.raises(UserError, match=r"layer 1 computes NaN.* in float16.*float32"):
            compute()


def test_an_ffn_that_does_nothing_gets_experts_and_a_router_too(dense, tokens_BT):
    dense.model.model.layers[0].mlp.down_proj.weight.data.zero_()
    split = Granularity(num_experts=4, expert_size=24, active_experts=1)
    config = CalibrateConfig(calibration_tokens=40)
    state = calibrate(dense, TokenBlocks(tokens_BT), split, config, AssignmentConfig(), seed=0)
    assert bool(torch.isfinite(state.affinity_LNE).all() & torch.isfinite(state.router_LED).all())
    assert float(state.affinity_LNE[0].std()) == pytest.approx(0.03, rel=0.2)
    assert float(state.affinity_LNE[1].std()) == pytest.approx(0.03)
    for affinity in state.affinity_LNE:
        assert torch.bincount(assigned(AssignmentConfig(), affinity, 24)).tolist() == [24] * 4


@pytest.mark.parametrize("start", ["data", "random"])
def test_no_layer_of_a_seed_draws_what_a_layer_of_another_draws(start, dense, tokens_BT):
    for layer in dense.model.model.layers:  # so that affinities are drawn in a start from data too
        layer.mlp.down_proj.weight.data.zero_()
    split = Granularity(num_experts=4, expert_size=24, active_experts=1)
    config = CalibrateConfig(start=start, calibration_tokens=40)
    states = [
        calibrate(dense, TokenBlocks(tokens_BT), split, config, AssignmentConfig(), seed=n)
        for n in range(3)
    ]
    drawn = [affinity_NE for state in states for affinity_NE in state.affinity_LNE]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(drawn, 2))


class Sizes(TorchDispatchMode):
    """Bytes of all memory that is allocated, by its place."""

    def __init__(self):
        super().__init__()
        self.made = dict[int, int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            memory = result.untyped_storage()
            self.made[memory.data_ptr()] = memory.nbytes()
        return result


@torch.no_grad()
def test_contributions_of_a_long_text_hold_only_their_result(dense, tokens_BT, monkeypatch):
    (x_TD, _), *_ = block_inputs(dense, tokens_BT, "ffn")
    ffn = dense.family.ffn(dense.model.model.layers[0])
    whole = contributions(ffn, x_TD)
    monkeypatch.setattr("dotmoe.method.calibrate.TOKENS_AT_ONCE", 100)
    with Sizes() as sizes:
        parts = contributions(ffn, x_TD)
    assert [size for size in sizes.made.values() if size > x_TD.nbytes] == [whole.nbytes]
    torch.testing.assert_close(parts, whole)


@torch.no_grad()
def test_contributions_are_the_sizes_of_the_neurons_terms(dense, tokens_BT):
    inputs = [x for x, _ in block_inputs(dense, tokens_BT, "ffn")]
    mlp = dense.model.model.layers[1].mlp
    x_BTD, _ = passed({"": mlp}, lambda: dense.model(input_ids=tokens_BT))[""]
    assert torch.equal(inputs[1], x_BTD.flatten(0, 1))

    found = contributions(dense.family.ffn(dense.model.model.layers[1]), inputs[1])
    x = inputs[1][7]
    terms_ND = (F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))[:, None] * mlp.down_proj.weight.T
    torch.testing.assert_close(found[7], terms_ND.norm(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms_ND.sum(dim=0), mlp(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi3", "granite", "gemma3_text"])
@torch.no_grad()
def test_a_layers_error_is_what_pruning_it_takes_from_the_stock_models_stream(
    family, dense_of, tokens_BT
):
    dense = dense_of(family, **GRANITE_FACTORS if family == "granite" else {})
    layer = dense.family.layers(dense.model)[0]  # later ones read what was pruned

    def streams():
        seen = passed({0: layer, 1: layer.mlp}, lambda: dense.model(input_ids=tokens_BT))
        return seen[1][0], seen[0][1]

    x_BTD, whole_BTD = streams()
    ffn = dense.family.ffn(layer)
    energy_TN = contributions(ffn, x_BTD.flatten(0, 1)).square()
    idle_N = energy_TN.mean(0).argsort()[: energy_TN.shape[1] // 2]
    before = ffn.down.weight.data.clone()
    ffn.down.weight.data[:, idle_N] = 0
    _, pruned_BTD = streams()
    ffn.down.weight.data = before
    ratio_BT = (pruned_BTD - whole_BTD).square().sum(-1) / whole_BTD.square().sum(-1)
    error = pruning_errors(dense, tokens_BT, 0.5)[0]
    assert error == pytest.approx(float(ratio_BT.clamp(max=1).mean()), rel=1e-3)


@pytest.mark.parametrize(
    ("errors", "leading"),
    [
        ([5.0] + [1.0] * 23, 1),
        ([3.9] + [1.0] * 23, 0),
        ([1.0] + [5.0] + [1.0] * 22, 0),  # not a leading one
        ([5.0] * 4 + [1.0] * 20, 2),  # one of 12 at most
        ([9.0] + [1.0] * 10, 0),
    ],
)
def test_leading_layers_far_above_the_median_stay_dense(errors, leading):
    assert num_leading_outliers(torch.tensor(errors)) == leading
