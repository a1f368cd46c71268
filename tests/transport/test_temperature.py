import numpy as np
import pytest

from dotmoe.transport import temperature


def test_it_falls_linearly_and_then_stays() -> None:
    taus = [temperature(step, start=1.0, end=0.1, warmup_steps=700) for step in range(1000)]
    expected = np.interp(np.arange(1000), [0, 700], [1.0, 0.1])
    np.testing.assert_allclose(taus, expected, rtol=1e-12)
    assert set(taus[700:]) == {0.1}


def test_without_warm_up_it_is_the_end_at_once() -> None:
    assert temperature(0, start=1.0, end=0.1, warmup_steps=0) == 0.1


@pytest.mark.parametrize(
    ("step", "start", "end", "warmup_steps"),
    [(-1, 1.0, 0.1, 10), (0, 1.0, 0.1, -1), (0, 0.0, 0.1, 10), (0, 1.0, 0.0, 10)],
)
def test_impossible_schedules_are_refused(
    step: int, start: float, end: float, warmup_steps: int
) -> None:
    with pytest.raises(ValueError, match="must"):
        temperature(step, start=start, end=end, warmup_steps=warmup_steps)
