import pytest

from dotmoe.errors import UserError
from dotmoe.granularity import (
    ExpertsConfig,
    Granularity,
    default_expert_size,
    nearest_expert_sizes,
    resolve,
)


def split(width: int, **settings: float) -> tuple[int, int, int]:
    """E, s, k."""
    found = resolve(ExpertsConfig(**settings), width)  # type: ignore[arg-type]
    return found.num_experts, found.expert_size, found.active_experts


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (18_944, (148, 128, 37)),  # Qwen2.5-7B
        (14_336, (112, 128, 28)),  # LLaMA-3-8B
        (11_008, (86, 128, 22)),  # LLaMA-2-7B: a quarter of 86 is 21.5
        (172, (43, 4, 11)),  # stories260K
    ],
)
def test_defaults_give_the_papers_experts_and_active_experts(width, expected):
    assert split(width) == expected


@pytest.mark.parametrize("width", [16, 17, 31, 96, 172, 768, 1_536, 2_730, 4_864, 8_960, 27_648])
def test_the_default_leaves_sixteen_experts_and_prefers_sizes_that_can_be_exported(width):
    allowed = [s for s in range(1, width + 1) if width % s == 0 and width // s >= 16 and s <= 128]
    eights, fours = ([s for s in allowed if s % step == 0] for step in (8, 4))
    assert default_expert_size(width) == max(eights or fours or allowed)


@pytest.mark.parametrize(
    ("width", "size"),
    [
        (96, 4),  # 6 is larger, but cannot be exported
        (2_200, 88),  # 100 and 110 are no multiples of 8
        (2_730, 105),  # no divisor is a multiple of 4
        (4_864, 128),  # Qwen2.5-0.5B
        (3_072, 128),  # Qwen3-0.6B
    ],
)
def test_default_sizes_by_hand(width, size):
    assert default_expert_size(width) == size


@pytest.mark.parametrize(
    ("size", "width", "multiple", "expected"),
    [
        (100, 11_008, 1, (86, 128)),
        (100, 11_008, 8, (64, 128)),
        (4, 172, 8, ()),  # 172 is 4 * 43
        (86, 172, 4, (4,)),  # 172 itself would leave one expert
    ],
)
def test_the_nearest_sizes_that_fit(size, width, multiple, expected):
    assert nearest_expert_sizes(size, width, multiple=multiple) == expected


def test_a_width_below_sixteen_has_no_default():
    with pytest.raises(UserError, match=r"^The FFN width is 12.*Set experts or expert_size\.$"):
        resolve(ExpertsConfig(), 12)
    assert split(12, experts=4) == (4, 3, 1)


@pytest.mark.parametrize(
    ("share", "experts", "active"),
    [
        (0.29, 50, 15),  # 14.5, but 0.29 * 50 is 14.499999999999998 in binary
        (0.5, 5, 3),
        (0.1, 25, 3),
        (0.001, 148, 1),
        (1.0, 148, 148),
        (0.999, 148, 148),
    ],
)
def test_the_share_rounds_half_up_and_never_to_zero(share, experts, active):
    assert split(experts * 8, experts=experts, active=share)[2] == active


def test_every_share_of_quarters_matches_whole_number_arithmetic():
    for experts in range(2, 200):
        for quarters in range(1, 5):
            active = split(experts, experts=experts, active=quarters / 4)[2]
            assert active == max(1, (2 * quarters * experts + 4) // 8)


def test_size_and_count_may_both_be_given_if_they_agree():
    assert split(11_008, expert_size=64, experts=172, active=0.25, active_experts=43) == (
        172,
        64,
        43,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_size": 100}, "expert_size is 100, .*width 11008.*Choose 86 or 128."),
        ({"expert_size": 0}, "expert_size is 0, .* must be 1 to 5504.*Choose 1."),
        ({"expert_size": 11_008}, "at least 2 experts. Choose 5504."),
        ({"expert_size": 20_000}, "expert_size is 20000, .*Choose 5504."),
        ({"experts": 100}, "experts is 100, .*width 11008.*Choose 86 or 128."),
        ({"experts": 1}, "experts is 1, .* must be 2 to 11008.*Choose 2."),
        ({"experts": -4}, "experts is -4, .* must be 2 to 11008.*Choose 2."),
        ({"experts": 86, "expert_size": 64}, "64 and experts 86 make 5504 .*11008. Give one"),
        ({"active": 0.0}, "active is 0, but the share .* above 0 and at most 1"),
        ({"active": 1.5}, "active is 1.5, but the share"),
        ({"active": float("nan")}, "active is nan, but the share"),
        ({"active_experts": 87}, "active_experts is 87, but a layer has 86 .*Choose 1 to 86"),
        ({"active_experts": 0}, "active_experts is 0, but a layer has 86"),
        ({"active": 0.25, "active_experts": 20}, "0.25 of 86 experts is 22, .* is 20. Give one"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_with_a_remedy(settings, message):
    with pytest.raises(UserError, match=message) as refusal:
        split(11_008, **settings)
    assert "\n" not in str(refusal.value)


def test_a_prime_width_names_the_only_size_there_is():
    with pytest.raises(UserError, match=r"Choose 1\.$"):
        split(173, expert_size=4)


def test_derived_figures():
    found = Granularity(num_experts=86, expert_size=128, active_experts=22)
    assert found.ffn_width == 11_008
    assert found.active_fraction == 22 / 86
