"""Each method against its own definition, written out serially. Oracles: NumPy, SciPy, autograd."""

from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

from dotmoe.baselines import METHODS
from dotmoe.baselines.co_activation import co_activation_counts, swapped, weight_inside
from dotmoe.baselines.llama_moe_v2 import importance, most_listed
from dotmoe.calibrate import ffn_inputs

S, E, K = 8, 12, 4


def silu(x):
    return x / (1 + np.exp(-x))


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def weights(dense, layer):
    mlp = dense.model.model.layers[layer].mlp
    return (
        mlp.gate_proj.weight.detach().double().numpy(),
        mlp.up_proj.weight.detach().double().numpy(),
    )


def test_random_split_deals_differently_in_every_layer_and_repeats_with_its_seed(given):
    layers = list(METHODS["random_split"].split(given("random_split")))
    again = list(METHODS["random_split"].split(given("random_split")))
    other = list(METHODS["random_split"].split(given("random_split", seed=5)))
    for one, two, three in zip(layers, again, other, strict=True):
        assert torch.equal(one.expert_of_neuron_N, two.expert_of_neuron_N)
        assert torch.equal(one.router_ED, two.router_ED)
        assert not torch.equal(one.expert_of_neuron_N, three.expert_of_neuron_N)
    assert not torch.equal(layers[0].expert_of_neuron_N, layers[1].expert_of_neuron_N)


def test_contiguous_split_cuts_where_the_neurons_lie(given):
    for made in METHODS["contiguous_split"].split(given("contiguous_split")):
        assert made.expert_of_neuron_N.tolist() == [n // S for n in range(E * S)]


def test_weight_clusters_join_rows_of_one_direction(dense, given):
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(E).repeat(S)[torch.randperm(E * S, generator=generator)]
    directions = torch.randn(E, 64, generator=generator)
    lengths = 0.1 + 3 * torch.rand(E * S, 1, generator=generator)  # must not matter
    gate = dense.model.model.layers[1].mlp.gate_proj
    with torch.no_grad():
        kept = gate.weight.clone()
        noise = 0.1 * torch.randn(E * S, 64, generator=generator)
        gate.weight.copy_(lengths * (directions[truth] + noise))
    made = list(METHODS["weight_clusters"].split(given("weight_clusters", cluster_starts=8)))[1]
    rows = unit(gate.weight.detach().double().numpy())
    with torch.no_grad():
        gate.weight.copy_(kept)
    for expert in range(E):
        members = (made.expert_of_neuron_N == expert).numpy()
        assert len(set(truth[members].tolist())) == 1
        np.testing.assert_allclose(
            made.router_ED[expert], unit(rows[members].mean(axis=0)), atol=1e-5
        )


def test_co_activation_counts_are_the_tokens_on_which_both_are_active(given):
    hidden = torch.randn(30, 10, generator=torch.Generator().manual_seed(0))
    counts = np.zeros((10, 10))
    for token in hidden.abs().numpy():
        active = sorted(range(10), key=lambda n: -token[n])[:4]
        for one in active:
            for other in active:
                counts[one, other] += one != other
    found = co_activation_counts(hidden, 4)
    assert found.tolist() == counts.tolist()
    expert = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    pairs = [(n, n + 1) for n in range(0, 10, 2)]
    assert weight_inside(found, expert) == 2 * sum(counts[pair] for pair in pairs)


def test_no_swap_of_two_neurons_improves_the_co_activation_cut(given):
    made = list(METHODS["co_activation"].split(given("co_activation")))[1]
    counts = co_activation_counts(made.layer.hidden(), K * S)
    expert = made.expert_of_neuron_N
    reached = weight_inside(counts, expert)
    for one in range(0, E * S, 5):
        for other in range(one + 1, E * S):
            swapped = expert.clone()
            swapped[one], swapped[other] = expert[other], expert[one]
            assert weight_inside(counts, swapped) <= reached
    generator = torch.Generator().manual_seed(0)
    chance = [
        weight_inside(counts, torch.randperm(E * S, generator=generator) // S) for _ in range(50)
    ]
    assert reached > max(chance)


def test_swaps_end_at_the_size_of_a_real_ffn():
    generator = torch.Generator().manual_seed(0)
    active = (torch.rand(64, 2_048, generator=generator) < 0.2).float()
    counts = (active.T @ active).fill_diagonal_(0)
    start = torch.randperm(2_048, generator=generator) // 128
    end = swapped(counts, start, 16)
    assert weight_inside(counts, end) > weight_inside(counts, start)
    assert torch.bincount(end).tolist() == [128] * 16


def test_importance_is_the_gradient_of_a_factor_on_each_activation(dense, tokens_BT):
    """|H dL/dH| is |dL/dm| at m = 1, where m multiplies H."""
    generator = torch.Generator().manual_seed(2)
    routers = [torch.randn(3, 64, generator=generator) for _ in range(2)]
    found = importance(dense, tokens_BT, routers, rows=4)
    tokens = tokens_BT.long()
    for layer in range(2):
        factor = torch.ones(*tokens.shape, E * S, requires_grad=True)
        down = dense.model.model.layers[layer].mlp.down_proj
        handle = down.register_forward_pre_hook(lambda module, args, m=factor: (args[0] * m,))
        logits = dense.model(input_ids=tokens).logits
        handle.remove()
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        ).backward()
        worth = factor.grad.abs().flatten(0, 1)
        cluster = (ffn_inputs(dense, tokens)[layer] @ routers[layer].T).argmax(dim=1)
        for expert in range(3):
            mean = worth[cluster == expert].mean(dim=0)
            torch.testing.assert_close(found[layer][expert], mean, rtol=1e-3, atol=1e-6)
    assert all(p.grad is None for p in dense.model.parameters())


def test_importance_never_holds_the_logits_of_all_tokens(dense, tokens_BT, monkeypatch):
    module = import_module("dotmoe.baselines.llama_moe_v2")
    monkeypatch.setattr(module, "_TOKENS_OF_LOGITS", 10)
    routers = [torch.ones(3, 64)] * 2
    sizes = []
    head = dense.family.head(dense.model)
    head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[:-1].numel()))
    found = importance(dense, tokens_BT, routers)
    assert max(sizes) == 10
    monkeypatch.undo()
    for few, all_at_once in zip(found, importance(dense, tokens_BT, routers), strict=True):
        torch.testing.assert_close(few, all_at_once)


def greedy(score_NE, free, room):
    """The expert with room whose best free neuron is worth most takes it, again and again."""
    expert_of, room = {}, [room] * score_NE.shape[1]
    free = set(free)
    while free:
        _, neuron, expert = max(
            (float(score_NE[n, e]), n, e) for n in free for e in range(len(room)) if room[e]
        )
        expert_of[neuron] = expert
        room[expert] -= 1
        free.remove(neuron)
    return expert_of


@pytest.mark.parametrize("method", ["llama_moe_v2", "llama_moe_v2_residual"])
def test_llama_moe_v2_takes_the_most_important_first(method, dense, tokens_BT, given):
    what = given(method)
    split = what.granularity
    made = list(METHODS[method].split(what))
    scores = importance(dense, tokens_BT, [m.router_ED for m in made])
    for layer, score_EN in zip(made, scores, strict=True):
        score = score_EN.T.double().numpy()
        listed = np.zeros(len(score))
        for expert in range(split.num_experts):
            best = sorted(range(len(score)), key=lambda n, e=expert: -score[n, e])
            for neuron in best[: split.expert_size]:
                listed[neuron] += 1
        order = sorted(range(len(score)), key=lambda n: (-listed[n], -score[n].sum()))
        shared = order[: split.shared_size]
        assert most_listed(score_EN.T, split.expert_size)[: len(shared)].tolist() == shared
        expected = dict.fromkeys(shared, -1) | greedy(
            score, order[len(shared) :], split.expert_size
        )
        found = layer.expert_of_neuron_N.tolist()
        assert found == [expected[n] for n in range(len(score))]


def test_cmoe_step_by_step(dense, given):
    what = given("cmoe", marked_neurons=9)
    split = what.granularity
    assert split.shared_size == 2 * S
    made = list(METHODS["cmoe"].split(what))[1]
    gate, up = weights(dense, 1)
    x = made.layer.x_TD.double().numpy()
    size = np.abs(silu(unit(x) @ unit(gate).T) * (unit(x) @ unit(up).T))
    marks = np.zeros_like(size)
    for token, row in enumerate(size):
        marks[token, sorted(range(len(row)), key=lambda n: -row[n])[:9]] = 1
    order = sorted(range(E * S), key=lambda n: -marks[:, n].sum())
    shared, routed = order[: split.shared_size], order[split.shared_size :]
    found = made.expert_of_neuron_N.numpy()
    assert sorted(np.flatnonzero(found == -1)) == sorted(shared)

    centres = marks[:, routed[: split.num_experts]]
    distance = np.abs(marks[:, :, None] - centres[:, None, :]).sum(axis=0)
    square = np.repeat(distance[routed], S, axis=1)
    best = square[linear_sum_assignment(square)].sum()
    assert distance[routed, found[routed]].sum() == pytest.approx(best)

    for expert, representative in enumerate(made.representative_E.tolist()):
        members = np.flatnonzero(found == expert)
        centre = marks[:, members].mean(axis=1)
        away = np.abs(marks[:, members] - centre[:, None]).sum(axis=0)
        assert representative in members
        chosen = np.abs(marks[:, representative] - centre).sum()
        assert chosen == pytest.approx(away.min())
