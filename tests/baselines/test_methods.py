"""Each method against its definition, written out serially. Oracles: NumPy, SciPy, autograd."""

import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

from dotmoe.common.errors import UserError
from dotmoe.method.calibrate import RidgeRouter, block_inputs, contributions
from dotmoe.method.config import AssignmentConfig, CalibrateConfig
from dotmoe.method.extract import extract, load_extracted, save_extracted
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import ALWAYS_ON, DROPPED
from dotmoe.method.transport import greedy_assignment
from dotmoe.rivals.baselines import (
    METHODS,
    SplitInputs,
    baseline,
    contract,
    granularity_of,
    routed_by_own,
    state_of,
)
from dotmoe.rivals.baselines.llama_moe_v2 import importance, most_listed
from dotmoe.rivals.baselines.lte import soft_stage
from dotmoe.rivals.baselines.moefication import by_predictor, co_activation_counts
from dotmoe.rivals.config import BaselineConfig

S, E, K = 8, 12, 4
SPLIT = Granularity(num_experts=E, expert_size=S, active_experts=K)


@pytest.fixture(autouse=True)
def _one_start(monkeypatch):
    monkeypatch.setattr(contract, "KMEANS_STARTS", 1)


@pytest.fixture
def inputs_of(dense, tokens_BT):
    """What a method splits, by its name."""

    def make(method, seed=0, **options):
        return SplitInputs(
            dense=dense,
            tokens_BT=tokens_BT,
            granularity=granularity_of(method, SPLIT),
            config=BaselineConfig(**options),
            calibrate=CalibrateConfig(),
            seed=seed,
        )

    return make


def splits(method, inputs):
    return list(METHODS[method].split(inputs))


def silu(x):
    return x / (1 + np.exp(-x))


def hidden_of(mlp, x):
    return F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)


def top(scores):
    """Where a row has its K largest."""
    return scores >= np.sort(scores, axis=1)[:, [-K]]


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


# --- from methods to layouts


@pytest.mark.parametrize(
    ("method", "split_router"), [*((name, "own") for name in METHODS), ("random_split", "ridge")]
)
def test_no_method_keeps_the_inputs_of_all_layers(
    method, split_router, dense_of, tokens_BT, monkeypatch
):
    """They are 6 bytes times layers, tokens and width: more than the memory of any machine."""
    dense, kept, most = dense_of("llama", num_hidden_layers=5), [], 0
    plain = SplitInputs.layers

    def watched(self, *converted):
        nonlocal most
        for layer in plain(self, *converted):
            kept.append(weakref.ref(layer.x_TD))
            most = max(most, sum(each() is not None for each in kept))
            yield layer

    monkeypatch.setattr(SplitInputs, "layers", watched)
    config = BaselineConfig(split_router=split_router, lte_steps=1)
    split = granularity_of(method, SPLIT)
    how = {"config": config, "calibrate": CalibrateConfig(), "seed": 0}
    baseline(method, SplitInputs(dense=dense, tokens_BT=tokens_BT, granularity=split, **how))
    assert len(kept) >= 5
    assert most <= 4  # CMoE reads two passes side by side


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_the_same_number_of_neurons_and_repeats(method, inputs_of):
    layout, again = (baseline(method, inputs_of(method, lte_steps=2)).layout for _ in range(2))
    assert layout.granularity.active_units == K * S
    assert torch.equal(layout.expert_of_neuron_LN, again.expert_of_neuron_LN)
    assert torch.equal(layout.router_LED, again.router_LED)


def test_the_stored_router_chooses_as_the_methods_own(inputs_of):
    layout = baseline("weight_clusters", inputs_of("weight_clusters")).layout
    for layer, made in enumerate(splits("weight_clusters", inputs_of("weight_clusters"))):
        own = (made.layer.x_TD @ made.router_ED.T).argsort(dim=1)
        logits = made.layer.x_TD @ layout.router_LED[layer].T
        assert (logits.argsort(dim=1) == own).float().mean() > 0.999
        assert logits.std() == pytest.approx(1, rel=1e-3)


def test_a_ridge_router_is_fitted_to_the_routed_experts_only(inputs_of):
    inputs = inputs_of("cmoe", split_router="ridge")
    layout = baseline("cmoe", inputs).layout
    layer = list(inputs.layers())[1]
    contribution = contributions(layer.ffn, layer.x_TD)
    energies = [contribution[:, own].square().sum(dim=1) for own in layout.neurons_of_expert(1)]
    target = 0.5 * torch.stack(energies, dim=1).log()
    expected = RidgeRouter(layer.x_TD, inputs.calibrate.ridge)(target)
    torch.testing.assert_close(layout.router_LED[1], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["random_split", "cmoe"])
@pytest.mark.parametrize("solver", ["newton", "sinkhorn"])
def test_the_state_of_a_layout_rounds_to_that_layout(solver, method, inputs_of):
    layout = baseline(method, inputs_of(method)).layout
    state = state_of(layout, torch.device("cpu"))
    for tau in (1.0, 0.1, 0.01):
        again = extract(state, layout.granularity, AssignmentConfig(solver=solver, tau_end=tau))
        assert torch.equal(again.expert_of_neuron_LN, layout.expert_of_neuron_LN)


def test_dense_layers_stay_dense_and_what_is_saved_is_loaded(inputs_of, tmp_path):
    inputs = inputs_of("cmoe")
    made = baseline(
        "cmoe", replace(inputs, granularity=replace(inputs.granularity, first_dense_layers=1))
    )
    assert (made.layout.moe_layers.start, made.layout.granularity.shared_size) == (1, 2 * S)
    save_extracted((made,), tmp_path)
    (again,) = load_extracted(tmp_path)
    assert torch.equal(again.layout.expert_of_neuron_LN, made.layout.expert_of_neuron_LN)
    assert torch.equal(again.own_router["representative"], made.own_router["representative"])


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("llama_moe_v2_residual", {"active_experts": 1}, "is 1, but llama_moe_v2_residual needs"),
        ("random_split", {"shared_size": S}, "random_split does not use shared.*or cmoe"),
    ],
)
def test_a_split_that_a_method_cannot_have_is_refused_in_a_line(method, changes, said):
    with pytest.raises(UserError, match=said):
        granularity_of(method, replace(SPLIT, **changes))


@pytest.mark.parametrize("method", ["weight_clusters", "co_activation", "llama_moe_v2"])
def test_fewer_tokens_than_experts_make_an_own_router_or_a_refusal(method, inputs_of):
    inputs = inputs_of(method)
    inputs = replace(inputs, tokens_BT=inputs.tokens_BT[:1, :8])
    if METHODS[method].own:
        assert set(baseline(method, inputs).own_router) == {"first", "second"}
    else:
        with pytest.raises(UserError, match=r"gives 8 tokens, but .* Raise calibration_tokens\.$"):
            baseline(method, inputs)


def test_a_shared_expert_of_the_split_stands_in_for_the_methods_own():
    split = SPLIT.with_shared(1)
    assert granularity_of("dot_moe", split) == granularity_of("cmoe", split) == split
    assert granularity_of("cmoe", SPLIT) == SPLIT.with_shared(K // 2)


# --- balanced clusters


# --- splits without data


@pytest.mark.parametrize("shared", [0, 1])
def test_static_pruning_keeps_the_neurons_that_contribute_most_and_drops_the_others(
    shared, dense, inputs_of
):
    split = granularity_of("static_pruning", SPLIT.with_shared(shared))
    inputs = replace(inputs_of("static_pruning", split_router="ridge"), granularity=split)
    made = baseline("static_pruning", inputs).layout
    assert made.granularity == split
    assert (split.active_experts, split.active_units) == (split.num_experts, K * S)
    for expert_N, layer, of in zip(
        made.expert_of_neuron_LN, dense.model.model.layers, inputs.layers(), strict=True
    ):
        sizes = layer.mlp.down_proj.weight.norm(dim=0)
        order = (
            (hidden_of(layer.mlp, of.x_TD) * sizes).square().mean(dim=0).argsort(descending=True)
        )
        experts = [n // S - shared if n >= shared * S else ALWAYS_ON for n in range(K * S)]
        assert expert_N[order].tolist() == experts + [DROPPED] * ((E - K) * S)
    with pytest.raises(UserError, match=r"router_steps .* static pruning has none"):
        state_of(made, torch.device("cpu"))


def test_random_split_deals_differently_in_every_layer_and_with_every_seed(inputs_of):
    dealt = [splits("random_split", inputs_of("random_split", seed)) for seed in (0, 1)]
    orders = [layer.expert_of_neuron_N for layers in dealt for layer in layers]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(orders, 2))


def test_contiguous_split_cuts_where_the_neurons_lie(inputs_of):
    for made in splits("contiguous_split", inputs_of("contiguous_split")):
        assert made.expert_of_neuron_N.tolist() == [n // S for n in range(E * S)]


def test_weight_clusters_join_rows_of_one_direction(dense, inputs_of, monkeypatch):
    monkeypatch.setattr(contract, "KMEANS_STARTS", 8)
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(E).repeat(S)[torch.randperm(E * S, generator=generator)]
    directions = torch.randn(E, 64, generator=generator)
    lengths = 0.1 + 3 * torch.rand(E * S, 1, generator=generator)  # must not matter
    noise = 0.1 * torch.randn(E * S, 64, generator=generator)
    gate = dense.model.model.layers[1].mlp.gate_proj.weight
    gate.data = lengths * (directions[truth] + noise)
    made = splits("weight_clusters", inputs_of("weight_clusters"))[1]
    rows = unit(gate.detach().double().numpy())
    for expert in range(E):
        members = (made.expert_of_neuron_N == expert).numpy()
        assert len(set(truth[members].tolist())) == 1
        direction = unit(rows[members].mean(axis=0))
        np.testing.assert_allclose(made.router_ED[expert], direction, atol=1e-5)


# --- co-activation


def weight_inside(counts, expert):
    return float((counts * (expert[:, None] == expert)).sum())


def test_co_activation_counts_are_the_tokens_on_which_both_are_active():
    hidden = torch.randn(30, 10, generator=torch.Generator().manual_seed(0))
    counts = np.zeros((10, 10))
    for token in hidden.abs().numpy():
        active = sorted(range(10), key=lambda n: -token[n])[:4]
        for one, other in itertools.permutations(active, 2):
            counts[one, other] += 1
    assert co_activation_counts(hidden, 4).tolist() == counts.tolist()


@torch.no_grad()
def test_no_swap_of_two_neurons_improves_the_co_activation_cut(dense, inputs_of):
    made = splits("co_activation", inputs_of("co_activation"))[1]
    hidden = hidden_of(dense.model.model.layers[1].mlp, made.layer.x_TD)
    counts = co_activation_counts(hidden, K * S)
    expert = made.expert_of_neuron_N
    reached = weight_inside(counts, expert)
    for one in range(0, E * S, 5):
        for other in range(one + 1, E * S):
            moved = expert.clone()
            moved[one], moved[other] = expert[other], expert[one]
            assert weight_inside(counts, moved) <= reached
    generator = torch.Generator().manual_seed(0)
    chance = [torch.randperm(E * S, generator=generator) // S for _ in range(50)]
    assert reached > max(weight_inside(counts, order) for order in chance)


# --- LLaMA-MoE v2


def test_importance_is_the_gradient_of_a_factor_on_each_activation(dense, tokens_BT):
    """|H dL/dH| is |dL/dm| at m = 1, where m multiplies H."""
    experts = [x[:, :3].argmax(dim=1) for x, _ in block_inputs(dense, tokens_BT, "ffn")]
    found = importance(dense, tokens_BT, experts, 3, rows=3)
    for layer in range(2):
        factor = torch.ones(*tokens_BT.shape, E * S, requires_grad=True)
        down = dense.model.model.layers[layer].mlp.down_proj
        with down.register_forward_pre_hook(lambda module, args, m=factor: (args[0] * m,)):
            logits = dense.model(input_ids=tokens_BT).logits
        labels = tokens_BT[:, 1:].flatten()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum").backward()
        worth = factor.grad.abs().flatten(0, 1)
        for expert in range(3):
            mean = worth[experts[layer] == expert].mean(dim=0)
            torch.testing.assert_close(found[layer][:, expert], mean, rtol=1e-3, atol=1e-6)
    assert all(p.grad is None for p in dense.model.parameters())


@pytest.mark.parametrize("method", ["llama_moe_v2", "llama_moe_v2_residual"])
def test_llama_moe_v2_takes_the_most_important_first(method, dense, tokens_BT, inputs_of):
    inputs = inputs_of(method)
    split = inputs.granularity
    made = splits(method, inputs)
    experts = [(m.layer.x_TD @ m.router_ED.T).argmax(dim=1) for m in made]
    scores = importance(dense, tokens_BT, experts, split.num_experts)
    for layer, score_NE in zip(made, scores, strict=True):
        score, expected = score_NE.double().numpy(), torch.full((E * S,), ALWAYS_ON)
        listed = np.zeros(len(score))
        for expert in range(split.num_experts):
            best = sorted(range(len(score)), key=lambda n, e=expert: -score[n, e])
            listed[best[: split.expert_size]] += 1
        order = sorted(range(len(score)), key=lambda n: (-listed[n], -score[n].sum()))
        shared, routed = order[: split.shared_size], order[split.shared_size :]
        assert most_listed(score_NE, split.expert_size)[: len(shared)].tolist() == shared
        expected[routed] = greedy_assignment(score_NE[routed], capacity=split.expert_size)
        assert torch.equal(layer.expert_of_neuron_N, expected)


# --- CMoE


def converted(mlp, expert_N, representative_E, k, x):
    """The FFN where the shared expert and the k of the strongest representatives run."""
    hidden = hidden_of(mlp, x)
    chosen = hidden[..., representative_E].abs().topk(k).indices
    runs = (expert_N == ALWAYS_ON) | (expert_N[:, None] == chosen[..., None, :]).any(dim=-1)
    return mlp.down_proj(hidden * runs)


def behind_converted(dense, first, inputs):
    """Inputs of the second FFN where the first is converted."""
    (mlp, second), seen = (layer.mlp for layer in dense.model.model.layers), []
    split = first.expert_of_neuron_N, first.own["representative"]
    k = inputs.granularity.active_experts
    moe = mlp.register_forward_hook(lambda _, args, out: converted(mlp, *split, k, *args))
    see = second.register_forward_pre_hook(lambda _, args: seen.extend(args))
    with torch.no_grad(), moe, see:
        dense.model(input_ids=inputs.tokens_BT.long())
    return seen[0].flatten(0, 1)


def test_cmoe_step_by_step(dense, inputs_of):
    inputs = inputs_of("cmoe")
    split = inputs.granularity
    assert split.shared_size == 2 * S
    first, made = splits("cmoe", inputs)
    mlp = dense.model.model.layers[1].mlp
    gate, up = (p.weight.detach().double().numpy() for p in (mlp.gate_proj, mlp.up_proj))
    x = behind_converted(dense, first, inputs).double().numpy()
    size = np.abs(silu(unit(x) @ unit(gate).T) * (unit(x) @ unit(up).T))
    marks = np.zeros_like(size)
    for token, row in enumerate(size):
        marks[token, sorted(range(len(row)), key=lambda n: -row[n])[:10]] = 1
    order = sorted(range(E * S), key=lambda n: -marks[:, n].sum())
    shared, routed = order[: split.shared_size], order[split.shared_size :]
    found = made.expert_of_neuron_N.numpy()
    assert sorted(np.flatnonzero(found == ALWAYS_ON)) == sorted(shared)

    centres = marks[:, routed[: split.num_experts]]
    distance = np.abs(marks[:, :, None] - centres[:, None, :]).sum(axis=0)
    square = np.repeat(distance[routed], S, axis=1)
    best = square[linear_sum_assignment(square)].sum()
    assert distance[routed, found[routed]].sum() == pytest.approx(best)

    for expert, representative in enumerate(made.own["representative"].tolist()):
        members = np.flatnonzero(found == expert)
        centre = marks[:, members].mean(axis=1)
        away = np.abs(marks[:, members] - centre[:, None]).sum(axis=0)
        assert representative in members
        assert np.abs(marks[:, representative] - centre).sum() == pytest.approx(away.min())


@torch.no_grad()
def test_cmoes_own_router_is_its_representatives_activation(dense, tokens_BT, inputs_of):
    made = baseline("cmoe", inputs_of("cmoe"))
    layout, mlp = made.layout, dense.model.model.layers[1].mlp
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with routed_by_own("cmoe", dense, made):
        found = mlp(x)
    split = layout.expert_of_neuron_LN[1], made.own_router["representative"][1]
    expected = converted(mlp, *split, layout.active_experts, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    target = dense.model(input_ids=tokens_BT).logits
    whole = replace(made, layout=replace(layout, active_experts=layout.num_experts))
    with routed_by_own("cmoe", dense, whole):
        logits = dense.model(input_ids=tokens_BT).logits
    torch.testing.assert_close(logits, target, rtol=1e-4, atol=1e-4)


# --- MoEfication's predictor


@pytest.mark.parametrize("method", ["weight_clusters", "co_activation"])
@torch.no_grad()
def test_the_predictor_finds_the_strongest_experts_more_often_than_similarity_does(
    method, dense, inputs_of
):
    """Strength written out: the summed size of an expert's activations."""
    layers = dense.model.model.layers
    for layer, made in zip(layers, splits(method, inputs_of(method)), strict=True):
        size = hidden_of(layer.mlp, made.layer.x_TD).abs().numpy()
        expert = made.expert_of_neuron_N.numpy()
        strength = np.stack([size[:, expert == e].sum(axis=1) for e in range(E)], axis=1)
        x = made.layer.x_TD.double().numpy()
        first, second, similar = (
            each.double().numpy().T
            for each in (made.own["first"], made.own["second"], made.router_ED)
        )
        chosen = top(np.tanh(x @ first) @ second)
        runs = by_predictor(made.own, made.layer.x_TD, made.layer.x_TD, K).bool().numpy()
        assert (runs == chosen).all(axis=1).mean() >= 0.999
        assert (chosen & top(strength)).sum() > (top(x @ similar) & top(strength)).sum()


# --- LTE


def test_a_step_of_ltes_soft_stage_follows_the_gradient_of_its_loss(dense, tokens_BT, inputs_of):
    """Oracle: the loss written out, with hooks of its own and Transformers' cross-entropy."""
    made = splits("random_split", inputs_of("lte"))
    experts = {layer: each.expert_of_neuron_N for layer, each in enumerate(made)}
    generator = torch.Generator().manual_seed(0)
    start = [0.1 * torch.randn(E, 64, generator=generator) for _ in experts]
    routers = [router.clone().requires_grad_() for router in start]
    optimizer = torch.optim.SGD(routers, lr=0.0)
    steps = soft_stage(dense, [tokens_BT] * 2, experts, routers, 0.25, optimizer)
    eta = 5.1 * (next(steps)["share"] / 0.25 - 1)  # proportional and integral part
    optimizer.param_groups[0]["lr"] = 1.0
    figures = next(steps)
    oracle, gates = [router.clone().requires_grad_() for router in start], []
    for layer, router in enumerate(oracle):
        mlp = dense.model.model.layers[layer].mlp

        def gated(module, args, out, mlp=mlp, router=router, layer=layer):
            gates.append(torch.sigmoid(args[0] @ router.T))
            hidden = hidden_of(mlp, args[0])
            return mlp.down_proj(hidden * gates[-1][..., experts[layer]])

        mlp.register_forward_hook(gated)
    loss = dense.model(input_ids=tokens_BT.long(), labels=tokens_BT.long()).loss
    every = torch.stack(gates)
    penalty = eta * (every**2).mean() + 0.01 * (1 / ((every - 0.5) ** 2 + 0.01)).mean()
    grads = torch.autograd.grad(loss + penalty, oracle)
    norm = max(1.0, float(torch.cat([g.flatten() for g in grads]).norm()))
    assert figures["ce"] == pytest.approx(loss.item(), rel=1e-5)
    assert figures["share"] == pytest.approx(float((every > 0.5).double().mean()))
    for before, after, grad in zip(start, routers, grads, strict=True):
        torch.testing.assert_close(before - after.detach(), grad / norm, rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_lte_runs_the_experts_over_the_threshold_and_comes_near_the_budget(dense, inputs_of):
    made = baseline("lte", inputs_of("lte", lte_steps=100))
    clusters = baseline("weight_clusters", inputs_of("weight_clusters")).layout
    assert torch.equal(made.layout.expert_of_neuron_LN, clusters.expert_of_neuron_LN)
    mlp = dense.model.model.layers[1].mlp
    x = list(inputs_of("lte").layers())[1].x_TD[:50]
    shares = []
    with routed_by_own("lte", dense, made, shares):
        found = mlp(x)
    over = (
        1 / (1 + np.exp(-(x.double().numpy() @ made.own_router["router"][1].double().numpy().T)))
        > 0.5
    )
    runs = torch.tensor(over[:, made.layout.expert_of_neuron_LN[1].numpy()])
    expected = mlp.down_proj(hidden_of(mlp, x) * runs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert shares[0].tolist() == pytest.approx(over.mean(axis=1))
    assert abs(over.mean() - K / E) < 0.15
