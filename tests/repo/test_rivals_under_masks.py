"""experiments/dejavu_and_read_me.py against dense computations, on a tiny model."""

from pathlib import Path

import pytest
import torch

import dejavu_and_read_me as script
from dotmoe.method.config import CalibrateConfig
from dotmoe.method.granularity import Granularity
from dotmoe.method.masked import masked_by
from dotmoe.rivals.baselines import SplitInputs, baseline, granularity_of
from dotmoe.rivals.config import BaselineConfig

SPLIT = Granularity(num_experts=12, expert_size=8, active_experts=4)


@pytest.fixture
def made(dense_of):
    """A dense model, tokens, and a random split of it."""
    dense, tokens_BT = dense_of("llama"), torch.randint(0, 250, (4, 64))
    inputs = SplitInputs(
        dense=dense,
        tokens_BT=tokens_BT,
        granularity=SPLIT,
        config=BaselineConfig(),
        calibrate=CalibrateConfig(),
        seed=0,
    )
    return dense, tokens_BT, baseline("random_split", inputs).layout, inputs


def settings(**changed):
    return script.Settings(run=Path(), out=Path(), **changed)


@torch.no_grad()
def test_a_perfect_predictor_runs_the_neurons_of_largest_terms(made):
    """Oracle: FFNs written out, every neuron's term by itself, sorted in NumPy."""
    dense, tokens_BT, layout, _ = made
    with script.by_neuron(dense, layout, script.strongest(dense, SPLIT)):
        found = dense.model(tokens_BT).logits

    def ffn(mlp, args, _):
        x_TD = args[0].flatten(0, 1).double()
        gate, up, down = (p.weight.double() for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        hidden_TN = torch.nn.functional.silu(x_TD @ gate.T) * (x_TD @ up.T)
        terms_TND = hidden_TN[:, :, None] * down.T
        order = terms_TND.norm(dim=2).numpy().argsort(axis=1)[:, -SPLIT.active_units :]
        chosen = terms_TND.gather(1, torch.tensor(order)[..., None].expand(-1, -1, down.shape[0]))
        return chosen.sum(dim=1).view_as(args[0]).float()

    for layer in dense.model.model.layers:
        layer.mlp.register_forward_hook(ffn)
    torch.testing.assert_close(found, dense.model(tokens_BT).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_read_me_with_one_domain_is_static_pruning(made):
    dense, tokens_BT, layout, inputs = made
    masks_LGN = script.domain_masks(dense, layout, tokens_BT, settings(domains=1))
    gate_GF = script.fitted_gate(dense, layout, tokens_BT, masks_LGN, 0.1)
    with script.by_domain(dense, layout, masks_LGN, gate_GF):
        found = dense.model(tokens_BT).logits
    split = granularity_of("static_pruning", SPLIT)
    inputs = SplitInputs(
        **{n: getattr(inputs, n) for n in inputs.__slots__} | {"granularity": split}
    )
    with masked_by(dense, baseline("static_pruning", inputs).layout):
        torch.testing.assert_close(found, dense.model(tokens_BT).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_gate_sends_tokens_to_the_domain_of_their_text_and_reads_no_later_one(made):
    """Two texts of different halves of the vocabulary are two domains."""
    dense, _, layout, _ = made
    tokens_BT = torch.cat([torch.randint(low, low + 60, (8, 64)) for low in (0, 120)])
    masks_LGN = script.domain_masks(dense, layout, tokens_BT, settings(domains=2))
    assert masks_LGN.sum(dim=2).eq(SPLIT.active_units).all()
    gate_GF = script.fitted_gate(dense, layout, tokens_BT, masks_LGN, 0.1)
    inputs_TF = script.gate_inputs(dense.model.get_input_embeddings()(tokens_BT))
    domain_BT = (inputs_TF @ gate_GF.T).argmax(dim=1).view_as(tokens_BT)
    late = domain_BT[:, 16:].float().mean(dim=1)
    assert abs(late[:8].mean() - late[8:].mean()) > 0.4
    changed = tokens_BT.clone()
    changed[:, 40:] = 0
    again_TF = script.gate_inputs(dense.model.get_input_embeddings()(changed))
    kept = again_TF.view(16, 64, -1)[:, :40], inputs_TF.view(16, 64, -1)[:, :40]
    torch.testing.assert_close(*kept)
