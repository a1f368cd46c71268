import json

import pytest

from dotmoe.common.errors import UserError
from dotmoe.common.options import check
from dotmoe.method.config import ExpertsConfig
from dotmoe.method.granularity import (
    default_expert_size,
    from_record,
    resolve,
    resolve_heads,
    splits_of,
    targets_of,
    to_record,
)


def split(width, **settings):
    """E, s, k."""
    check(ExpertsConfig(**settings))
    found = resolve(ExpertsConfig(**settings), width)
    assert found.units == width
    return found.num_experts, found.expert_size, found.active_experts


@pytest.mark.parametrize(
    ("width", "settings", "expected"),
    [
        (18_944, {}, (148, 128, 37)),  # Qwen2.5-7B
        (14_336, {}, (112, 128, 28)),  # LLaMA-3-8B
        (11_008, {}, (86, 128, 22)),  # LLaMA-2-7B: a quarter of 86 is 21.5
        (172, {}, (43, 4, 11)),  # stories260K
        (12, {"experts": 4}, (4, 3, 1)),
        (11_008, {"expert_size": 64, "active_experts": 43}, (172, 64, 43)),
        # 14.5 rounds half up, but 0.29 * 50 is 14.499999999999998 in binary.
        (400, {"experts": 50, "active": 0.29}, (50, 8, 15)),
        (40, {"experts": 5, "active": 0.5}, (5, 8, 3)),
        (1184, {"experts": 148, "active": 0.001}, (148, 8, 1)),
        (1184, {"experts": 148, "active": 1.0}, (148, 8, 148)),
    ],
)
def test_the_papers_defaults_and_shares_that_round_half_up(width, settings, expected):
    assert split(width, **settings) == expected


@pytest.mark.parametrize("width", [16, 17, 31, 96, 172, 768, 1_536, 2_200, 2_730, 4_864, 27_648])
def test_the_default_leaves_many_experts_of_sizes_that_can_be_exported(width):
    def allowed(fewest, step):
        sizes = range(step, min(128, width // fewest) + 1, step)
        return [size for size in sizes if width % size == 0]

    choices = (allowed(fewest, step) for fewest in (32, 16) for step in (8, 4))
    best = next(filter(None, choices), allowed(16, 1))
    assert default_expert_size(width) == max(best)


@pytest.mark.parametrize(
    ("width", "settings", "message"),
    [
        (11_008, {"expert_size": 100}, "expert_size is 100, .*width 11008.*Choose 86 or 128."),
        (11_008, {"expert_size": 11_008}, "2 or more equal experts. Choose 5504."),
        (173, {"expert_size": 4}, "Choose 1."),
        (11_008, {"experts": 100}, "experts is 100, .*width 11008.*Choose 86 or 128."),
        (11_008, {"experts": 86, "expert_size": 64}, "is 64 and experts is 86, .*Give only one"),
        (11_008, {"active_experts": 87}, "active_experts is 87, .*has 86 .*Choose 1 to 86"),
        (11_008, {"active": 0.25, "active_experts": 20}, "is 0.25 and active_experts is 20, "),
        (12, {}, "The FFN width is 12.*Set experts or expert_size."),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_with_a_remedy(width, settings, message):
    with pytest.raises(UserError, match=message) as refusal:
        split(width, **settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"active": 0.5}, (72, 24, 384)),
        ({"active_experts": 48}, (72, 24, 384)),
        ({"active": 0.5, "shared": 0.001}, (95, 47, 16)),
        ({"active": 0.5, "shared": 0.0}, (96, 48, 0)),
    ],
)
def test_a_shared_expert_is_part_of_what_runs(settings, expected):
    found = resolve(ExpertsConfig(**{"expert_size": 16, "shared": 0.25} | settings), 1536)
    assert (found.num_experts, found.active_experts, found.shared_size) == expected
    assert (found.units, found.active_units, found.active_fraction) == (1536, 768, 0.5)
    assert found.capacity == (16,) * found.num_experts + (found.shared_size,) * (expected[2] > 0)
    assert found.columns == len(found.capacity)


def test_splits_of_heads_and_what_does_not_fit():
    odd = resolve_heads(ExpertsConfig(targets="attention", active_attention=0.5), 9)
    assert (odd.num_experts, odd.expert_size, odd.active_experts) == (9, 1, 5)
    both = splits_of(ExpertsConfig(targets="both"), 768, 6)
    assert [(split.units, split.target) for split in both] == [(768, "ffn"), (6, "attention")]
    assert [targets_of(each) for each in (both, both[:1], both[1:])] == ["both", "ffn", "attention"]
    assert from_record(json.loads(json.dumps(to_record(both)))) == both
    with pytest.raises(UserError, match=r"heads_per_expert is 4, which does not divide the 9 .* 3"):
        resolve_heads(ExpertsConfig(targets="attention", heads_per_expert=4), 9)
