"""The start from data. Oracles: planted clusters, NumPy's least squares, the dense model."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dotmoe.calibrate import (
    CalibrateConfig,
    calibrate,
    cluster_affinity,
    contributions,
    ffn_inputs,
    harden,
    ridge_router,
)
from dotmoe.load import LoadConfig, load_dense


def test_planted_clusters_are_found():
    generator = torch.Generator().manual_seed(0)
    topics_TE = torch.rand(200, 4, generator=generator)
    truth = torch.arange(4).repeat(8)[torch.randperm(32, generator=generator)]
    noise = 0.05 * torch.rand(200, 32, generator=generator)
    affinity = cluster_affinity(topics_TE[:, truth] + noise, 4, CalibrateConfig(), seed=0)
    found = harden(affinity)
    for expert in range(4):
        assert len(set(truth[found == expert].tolist())) == 1


def test_hardening_is_balanced_at_any_scale_of_affinities():
    affinity = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    for scale in (1e-4, 1.0, 1e4):
        assert torch.bincount(harden(affinity * scale), minlength=5).tolist() == [12] * 5
        assert torch.equal(harden(affinity * scale), harden(affinity))


@pytest.mark.parametrize("outlier", [1.0, 1e4])
def test_the_router_is_numpys_ridge_regression_up_to_scale(outlier):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    x[:, 2] *= outlier  # as the channels of massive activations
    energy = torch.rand(300, 4, generator=generator)
    router = ridge_router(x, energy, ridge=1e-7).numpy()

    x = x.double().numpy()
    share = np.sqrt(energy.double().numpy())
    share = share / share.sum(axis=1, keepdims=True)
    target = share - share.mean(axis=1, keepdims=True)
    penalty = 1e-7 * np.mean(np.sum(x**2, axis=0))
    stacked = np.vstack([x, np.sqrt(penalty) * np.eye(6)])
    oracle = np.linalg.lstsq(stacked, np.vstack([target, np.zeros((6, 4))]), rcond=None)[0].T
    oracle = oracle - oracle.mean(axis=0)
    oracle /= (x @ oracle.T).std(ddof=1)
    np.testing.assert_allclose(router, oracle, rtol=1e-5, atol=1e-9)


def test_an_ffn_that_does_nothing_gets_experts_and_a_router_too(tiny_dense):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))
    for layer in dense.model.model.layers[:1]:
        layer.mlp.down_proj.weight.data.zero_()
    tokens = torch.arange(2, 42).view(2, 20)
    state = calibrate(dense, tokens, 4, CalibrateConfig(calibration_tokens=40), seed=0)
    assert bool(torch.isfinite(state.affinity_LNE).all() & torch.isfinite(state.router_LED).all())
    assert float(state.affinity_LNE[0].std()) == pytest.approx(0.03, rel=0.2)
    assert float(state.affinity_LNE[1].std()) == pytest.approx(0.03)
    for affinity in state.affinity_LNE:
        assert torch.bincount(harden(affinity)).tolist() == [24] * 4
    assert torch.bincount(harden(torch.zeros(12, 4))).tolist() == [3] * 4


def test_contributions_are_the_sizes_of_the_neurons_terms(tiny_dense):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))
    tokens = torch.arange(2, 42).view(2, 20)
    inputs = ffn_inputs(dense, tokens)
    seen = []
    mlp = dense.model.model.layers[1].mlp
    handle = mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    dense.model(input_ids=tokens)
    handle.remove()
    assert torch.equal(inputs[1], seen[0].flatten(0, 1))

    found = contributions(dense.family.ffn(dense.model.model.layers[1]), inputs[1])
    x = inputs[1][7]
    hidden = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    for neuron in (0, 50, 95):
        term = hidden[neuron] * mlp.down_proj.weight[:, neuron]
        assert torch.isclose(found[7, neuron], term.norm(), rtol=1e-5)
    whole = sum(hidden[n] * mlp.down_proj.weight[:, n] for n in range(96))
    assert torch.allclose(whole, mlp(x), atol=1e-4)
