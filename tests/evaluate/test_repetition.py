import pytest

from dotmoe.evaluate.repetition import distinct_n, loop_tokens, rep_n, repetition

BLOCK = [4, 9, 2, 7, 5]
PROSE = list(range(100, 140))


def in_loops(tokens):
    """Places in a loop, straight from the definition: every stretch, every period."""
    inside = set()
    for start in range(len(tokens)):
        for end in range(start + 12, len(tokens) + 1):
            stretch = tokens[start:end]
            periods = range(1, min(64, len(stretch) // 3) + 1)
            if any(stretch[p:] == stretch[:-p] for p in periods):
                inside |= set(range(start, end))
    return [place in inside for place in range(len(tokens))]


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        (PROSE, 0),
        (BLOCK * 3, 15),
        (BLOCK * 2 + [4], 0),
        (PROSE + BLOCK * 4 + [4, 9], 22),
        ([1] * 11, 0),
        ([1] * 12, 12),
        (PROSE + [1] * 12 + PROSE, 12),
        (BLOCK * 3 + PROSE + [8, 3] * 7, 29),
    ],
)
def test_loops_made_by_hand_are_found_token_for_token(tokens, looping):
    assert sum(loop_tokens(tokens)) == looping
    assert loop_tokens(tokens) == in_loops(tokens)


def test_loops_equal_the_definition_on_drawn_sequences():
    state = 1
    for _ in range(20):
        tokens = []
        for _ in range(60):
            state = state * 48271 % 2147483647
            tokens.append(tokens[-3] if state % 10 and len(tokens) > 3 else state // 10 % 3)
        assert loop_tokens(tokens) == in_loops(tokens)


def test_a_block_longer_than_the_longest_period_is_no_loop():
    assert sum(loop_tokens(list(range(65)) * 3)) == 0
    assert sum(loop_tokens(list(range(64)) * 3)) == 192


def test_rep_n_and_distinct_n_by_hand():
    tokens = [1, 2, 3, 1, 2, 3]  # 2-grams: 12 23 31 12 23
    assert rep_n(tokens, 2) == pytest.approx(2 / 5)
    assert rep_n(tokens, 4) == 0
    assert rep_n([1], 2) == 0
    assert distinct_n([tokens, [1, 2]], 1) == 3 / 8
    assert distinct_n([tokens, [1, 2]], 2) == 3 / 6
    assert distinct_n([[], [1]], 2) == 1


def test_figures_of_a_set():
    found = repetition([BLOCK * 4, PROSE[:20], []])
    assert found.loop_share == 20 / 40
    assert found.looping == pytest.approx(1 / 3)
    assert found.rep_2 == pytest.approx((1 - 5 / 19) / 3)
    assert found.diversity == pytest.approx(
        (1 - found.rep_2) * (1 - found.rep_3) * (1 - found.rep_4)
    )
    assert found.tokens == 40


def test_a_loop_in_the_middle_does_not_end_the_text():
    assert repetition([[*BLOCK * 4, 1, 2, 3, 6, 8]]).looping == 0
    assert repetition([[1, 2, 3, 6, 8, *BLOCK * 4]]).looping == 1
