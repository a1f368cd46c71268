"""ExpertLayout: what it refuses, and that it survives the disk."""

import pytest
import torch

from dotmoe.common.errors import UserError
from dotmoe.method.config import AssignmentConfig
from dotmoe.method.extract import extract
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import ExpertLayout, save_layouts
from dotmoe.method.state import STATE, AlignState, save_states


def layout(**changes):
    values = {
        "expert_of_neuron_LN": torch.tensor([[0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 0]]),
        "router_LED": torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)),
        "active_experts": 2,
    }
    return ExpertLayout(**(values | changes))


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_file_is_refused_in_one_line(damage, tmp_path):
    file = tmp_path / "layout.safetensors"
    if damage == "truncated":
        save_layouts((layout(),), tmp_path)
        file.write_bytes(file.read_bytes()[:-40])
    if damage == "foreign":
        state = {"affinity_LNE": torch.zeros(1, 4, 2), "router_LED": torch.zeros(1, 2, 3)}
        save_states((AlignState(**state),), tmp_path)
        (tmp_path / STATE).rename(file)
    with pytest.raises(UserError, match="layout") as error:
        ExpertLayout.load(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_of_neuron_LN": [[0, 0, 0, 0, 1, 2]] * 2}, "not balanced: 1 to 4"),
        ({"expert_of_neuron_LN": [[-1, 0, 1, 2], [-1, -1, 0, 1]]}, "not balanced"),
        ({"expert_of_neuron_LN": [[0, 1, 2, 0, 1, 3]] * 2}, "0 to 2, or be -1 or -2"),
        ({"expert_of_neuron_LN": [[-3, 0, 1, 2], [-1, 0, 1, 2]]}, "or be -1 or -2"),
        ({"expert_of_neuron_LN": [[-2, 0, 1, 2], [-1, 0, 1, 2]]}, "not balanced"),
        ({"expert_of_neuron_LN": [[-1, 0, 1, 2], [-1, -1, -1, -1]]}, "leading"),
        ({"expert_of_neuron_LN": [[-1, -1, -1, -1]] * 2}, "leading"),
        ({"router_LED": [[[float("nan")] * 4] * 3] * 2}, "NaN"),
        ({"active_experts": 4}, r"active_experts is 4.*Choose 1 to 3"),
        ({"active_experts": 0}, "Choose 1 to 3"),
    ],
)
def test_a_layout_that_is_none_is_refused(changes, message):
    changes = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        layout(**changes)


def test_extraction_centres_routers_and_keeps_the_routing():
    generator = torch.Generator().manual_seed(0)
    affinity = torch.randn(2, 12, 4, generator=generator)
    router = torch.randn(2, 4, 8, generator=generator) + 3
    state = AlignState(affinity_LNE=affinity, router_LED=router)
    split = Granularity(num_experts=4, expert_size=3, active_experts=2)
    extracted = extract(state, split, AssignmentConfig())
    assert float(extracted.router_LED.mean(dim=1).abs().max()) < 1e-6
    x = torch.randn(500, 8, generator=generator)
    before = (x @ router[0].T).topk(2).indices.sort().values
    after = (x @ extracted.router_LED[0].T).topk(2).indices.sort().values
    assert (before == after).all(dim=1).float().mean() > 0.99


def test_neurons_of_experts_always_on_and_of_leading_dense_layers():
    assert layout().neurons_of_expert(1).tolist() == [[4, 5], [2, 3], [0, 1]]
    mixed = layout(expert_of_neuron_LN=torch.tensor([[-1, -1, -1, -1, -1], [2, -1, 1, 0, -1]]))
    assert list(mixed.moe_layers) == [1]
    assert mixed.shared_neurons(1).tolist() == [1, 4]
    assert mixed.neurons_of_expert(1).tolist() == [[3], [2], [0]]
    assert mixed.granularity.active_fraction == (2 + 2 * 1) / 5
    assert mixed.granularity == Granularity(
        num_experts=3, expert_size=1, active_experts=2, shared_size=2, first_dense_layers=1
    )
