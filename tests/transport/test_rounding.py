import pytest
import torch
from torch import Tensor

from dotmoe.transport import balanced_plan, greedy_assignment


def serial(plan: Tensor, capacity: int | list[int]) -> list[int]:
    """The definition: all entries, largest first, ties by flat index."""
    num_neurons, num_experts = plan.shape
    values = plan.flatten().tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    expert_of: dict[int, int] = {}
    room = [capacity] * num_experts if isinstance(capacity, int) else list(capacity)
    for entry in order:
        neuron, expert = divmod(entry, num_experts)
        if neuron not in expert_of and room[expert]:
            expert_of[neuron] = expert
            room[expert] -= 1
    return [expert_of[neuron] for neuron in range(num_neurons)]


def scores(kind: str, N: int, E: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(N, E, generator=generator)
    if kind == "normal":
        return noise
    if kind == "plan":
        return balanced_plan(noise, capacity=N // E, tau=0.3).plan
    if kind == "sharp plan":
        return balanced_plan(noise, capacity=N // E, tau=0.02).plan
    if kind == "quantised":
        return (balanced_plan(noise, capacity=N // E, tau=0.3).plan * 8).round() / 8
    if kind == "two values":
        return (noise > 0).float()
    if kind == "everyone agrees":
        return noise[:1].expand(N, E).contiguous()
    if kind == "agreed order of neurons":
        return noise[:, :1].expand(N, E).contiguous()
    if kind == "double precision":
        return noise.double() + 1e-12 * noise.flip(0).double()
    if kind == "zeros of both signs":
        return torch.where(noise.abs() < 0.8, noise * 0.0, noise)
    if kind == "half precision":
        return noise.softmax(dim=-1).bfloat16()
    assert kind == "constant"
    return torch.full((N, E), 0.5)


KINDS = ["normal", "plan", "sharp plan", "quantised", "two values", "everyone agrees"]
KINDS += ["agreed order of neurons", "half precision", "constant", "double precision"]
KINDS += ["zeros of both signs"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_the_serial_definition(kind: str) -> None:
    for N, E in ((1, 1), (6, 3), (12, 12), (40, 2), (60, 6), (96, 24)):
        for seed in range(8):
            plan = scores(kind, N, E, seed)
            expected = serial(plan, N // E)
            assert greedy_assignment(plan, capacity=N // E).tolist() == expected, (N, E, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_may_differ_in_capacity(kind: str) -> None:
    room = [9, 1, 4, 20, 6]
    for seed in range(4):
        plan = scores(kind, 40, 5, seed)
        found = greedy_assignment(torch.stack([plan, plan.flip(0)]), capacity=torch.tensor(room))
        assert found.tolist() == [serial(plan, room), serial(plan.flip(0), room)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(5, 2), "5 neurons do not fill 2 experts of 2"),
        (torch.tensor([[0.0, torch.nan]] * 4), "NaN"),
        (torch.tensor([[0.0, -torch.inf]] * 4), "infinity"),
    ],
)
def test_impossible_plans_are_refused(bad: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_assignment(bad, capacity=2)
