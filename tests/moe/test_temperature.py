import numpy as np

from dotmoe.moe.assignment import AssignmentConfig


def test_it_falls_linearly_and_then_stays() -> None:
    config = AssignmentConfig(tau_start=1.0, tau_end=0.1)
    taus = [config.tau(step, 700) for step in range(1000)]
    np.testing.assert_allclose(taus, np.interp(np.arange(1000), [0, 700], [1.0, 0.1]), rtol=1e-12)
    assert set(taus[700:]) == {0.1}


def test_without_warm_up_it_is_the_end_at_once() -> None:
    assert AssignmentConfig(tau_end=0.1).tau(0, 0) == 0.1
