import pytest
import torch

from dotmoe.method.transport import balanced_plan, greedy_assignment


def serial(plan, capacity):
    """The definition: all entries, largest first, ties by flat index."""
    values, room = plan.flatten().tolist(), list(capacity)
    expert_of = {}
    for entry in sorted(range(len(values)), key=lambda i: (-values[i], i)):
        neuron, expert = divmod(entry, len(room))
        if neuron not in expert_of and room[expert]:
            expert_of[neuron] = expert
            room[expert] -= 1
    return [expert_of[neuron] for neuron in range(len(plan))]


def plan_of(noise, tau):
    return balanced_plan(noise, capacity=len(noise) // noise.shape[1], tau=tau).entries


SCORES = {
    "normal": lambda noise: noise,
    "plan": lambda noise: plan_of(noise, 0.3),
    "sharp plan": lambda noise: plan_of(noise, 0.02),
    "quantised": lambda noise: (plan_of(noise, 0.3) * 8).round() / 8,
    "two values": lambda noise: (noise > 0).float(),
    "everyone agrees": lambda noise: noise[:1].expand(noise.shape).contiguous(),
    "agreed order of neurons": lambda noise: noise[:, :1].expand(noise.shape).contiguous(),
    "half precision": lambda noise: noise.softmax(dim=-1).bfloat16(),
    "constant": lambda noise: torch.full_like(noise, 0.5),
    "double precision": lambda noise: noise.double() + 1e-12 * noise.flip(0).double(),
    "zeros of both signs": lambda noise: torch.where(noise.abs() < 0.8, noise * 0.0, noise),
}


@pytest.mark.parametrize("kind", SCORES)
def test_it_equals_the_serial_definition(kind):
    def scores(N, E, seed):
        return SCORES[kind](torch.randn(N, E, generator=torch.Generator().manual_seed(seed)))

    for N, E in ((1, 1), (6, 3), (12, 12), (40, 2), (60, 6), (96, 24)):
        for seed in range(8):
            plan = scores(N, E, seed)
            expected = serial(plan, [N // E] * E)
            assert greedy_assignment(plan, capacity=N // E).tolist() == expected, (N, E, seed)
    room = [9, 1, 4, 20, 6]
    for seed in range(4):
        plan = scores(40, 5, seed)
        found = greedy_assignment(torch.stack([plan, plan.flip(0)]), capacity=torch.tensor(room))
        assert found.tolist() == [serial(plan, room), serial(plan.flip(0), room)]
