"""From methods to layouts. Oracles: the budget, the dense model, layers written out, plain sums."""

import pytest
import torch

from dotmoe.baselines import METHODS, Baseline, baseline, granularity_of, state_of
from dotmoe.baselines.contract import BaselineConfig
from dotmoe.baselines.own_router import routed_by_representatives
from dotmoe.calibrate import contributions, ridge_router
from dotmoe.config import RunConfig
from dotmoe.errors import UserError
from dotmoe.extract import extract
from dotmoe.granularity import Granularity
from dotmoe.layout import ALWAYS_ON
from dotmoe.moe.assignment import AlignState, AssignmentConfig
from dotmoe.moe.masked import masked_by
from dotmoe.options import check
from dotmoe.pipeline import settled

S, K = 8, 4
SPLIT = Granularity(num_experts=12, expert_size=S, active_experts=K)


def made_by(method, given, **options):
    return baseline(method, given(method, **options))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_the_same_number_of_neurons_and_repeats(method, given):
    one, two = made_by(method, given), made_by(method, given)
    layout = one.layout
    assert layout.shared_size + layout.active_experts * layout.expert_size == K * S
    for layer in range(2):
        mask = torch.zeros(layout.num_experts)
        mask[: layout.active_experts] = 1
        runs = torch.cat([mask, torch.ones(1)])[layout.expert_of_neuron_LN[layer]]
        assert int(runs.sum()) == K * S
    assert torch.equal(layout.expert_of_neuron_LN, two.layout.expert_of_neuron_LN)
    assert torch.equal(layout.router_LED, two.layout.router_LED)


def test_the_stored_router_chooses_as_the_methods_own(given):
    what = given("weight_clusters")
    layout = baseline("weight_clusters", what).layout
    for layer, made in enumerate(METHODS["weight_clusters"].split(what)):
        own = (made.layer.x_TD @ made.router_ED.T).argsort(dim=1)
        logits = made.layer.x_TD @ layout.router_LED[layer].T
        assert (logits.argsort(dim=1) == own).float().mean() > 0.999
        assert logits.std() == pytest.approx(1, rel=1e-3)


def test_a_ridge_router_is_fitted_to_the_routed_experts_only(given):
    what = given("cmoe", split_router="ridge")
    layout = baseline("cmoe", what).layout
    layer = list(what.layers())[1]
    contribution = contributions(layer.ffn, layer.x_TD)
    energy = torch.stack(
        [contribution[:, neurons].square().sum(dim=1) for neurons in layout.neurons_of_expert(1)],
        dim=1,
    )
    expected = ridge_router(layer.x_TD, energy, what.calibrate.ridge)
    torch.testing.assert_close(layout.router_LED[1], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("solver", ["newton", "sinkhorn"])
def test_the_state_of_a_layout_rounds_to_that_layout(solver, given):
    layout = made_by("random_split", given).layout
    state = state_of(layout, torch.device("cpu"))
    assert isinstance(state, AlignState)
    for tau in (1.0, 0.1, 0.01):
        config = AssignmentConfig(solver=solver, tau_end=tau)
        again = extract(state, SPLIT, config)
        assert torch.equal(again.expert_of_neuron_LN, layout.expert_of_neuron_LN)


def test_dense_layers_stay_dense(dense, tokens_BT, given):
    from dataclasses import replace

    what = given("cmoe")
    what = replace(what, granularity=replace(what.granularity, first_dense_layers=1))
    layout = baseline("cmoe", what).layout
    assert layout.first_dense_layers == 1
    assert layout.shared_size == 2 * S


def written_out(mlp, layout, layer, representatives, x):
    """CMoE's layer, token by token."""
    out = []
    for token in x:
        hidden = torch.nn.functional.silu(mlp.gate_proj(token)) * mlp.up_proj(token)
        scores = [float(hidden[n].abs()) for n in representatives]
        chosen = sorted(range(len(scores)), key=lambda e: -scores[e])[: layout.active_experts]
        total = torch.zeros_like(token)
        for neuron, expert in enumerate(layout.expert_of_neuron_LN[layer].tolist()):
            if expert == ALWAYS_ON or expert in chosen:
                total = total + hidden[neuron] * mlp.down_proj.weight[:, neuron]
        out.append(total)
    return torch.stack(out)


@torch.no_grad()
def test_cmoes_own_router_is_its_representatives_activation(dense, tokens_BT, given):
    made = made_by("cmoe", given)
    mlp = dense.model.model.layers[1].mlp
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with routed_by_representatives(dense, made.layout, made.representative_LE):
        found = dense.model.model.layers[1].mlp(x)
    expected = written_out(mlp, made.layout, 1, made.representative_LE[1].tolist(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert dense.model.model.layers[1].mlp is mlp

    tokens = tokens_BT.long()
    whole = made.layout.with_active_experts(made.layout.num_experts)
    target = dense.model(input_ids=tokens).logits
    with routed_by_representatives(dense, whole, made.representative_LE):
        torch.testing.assert_close(
            dense.model(input_ids=tokens).logits, target, rtol=1e-4, atol=1e-4
        )
    with masked_by(dense, whole):
        torch.testing.assert_close(
            dense.model(input_ids=tokens).logits, target, rtol=1e-4, atol=1e-4
        )


def test_what_is_saved_is_what_is_loaded(given, tmp_path):
    made = made_by("cmoe", given)
    made.save(tmp_path)
    again = Baseline.load(tmp_path)
    assert torch.equal(again.layout.expert_of_neuron_LN, made.layout.expert_of_neuron_LN)
    assert torch.equal(again.layout.router_LED, made.layout.router_LED)
    assert torch.equal(again.representative_LE, made.representative_LE)


@pytest.mark.parametrize(
    ("method", "shared", "active", "said"),
    [
        ("cmoe", 4, 4, r"shared_experts is 4.*Choose 1 to 3"),
        ("llama_moe_v2_residual", None, 1, r"active_experts is 1.*at least 2"),
        ("random_split", 2, 4, r"random_split has no shared expert"),
        ("dot_moe", 2, 4, r"dot_moe has no shared expert"),
    ],
)
def test_a_shared_expert_that_does_not_fit_is_refused(method, shared, active, said):
    split = Granularity(num_experts=12, expert_size=S, active_experts=active)
    with pytest.raises(UserError, match=said) as refused:
        granularity_of(method, split, BaselineConfig(shared_experts=shared))
    assert "\n" not in str(refused.value)


def test_a_router_beside_a_shared_expert_is_not_trained():
    config = RunConfig(model="", out="", method="cmoe", baseline=BaselineConfig(router_steps=3))
    with pytest.raises(UserError, match=r"router_steps is 3.*cmoe has a shared expert"):
        settled(config)


@pytest.mark.parametrize(
    ("option", "value"), [("cluster_rounds", 0), ("marked_neurons", 0), ("router_steps", -1)]
)
def test_numbers_that_no_method_can_use_are_refused(option, value):
    config = RunConfig(model="", out="", baseline=BaselineConfig(**{option: value}))
    with pytest.raises(UserError, match=f"{option} is {value}, but it must be at least"):
        check(config)
