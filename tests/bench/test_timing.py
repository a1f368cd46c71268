"""Figures of repeated rounds, and the memory of a process."""

import sys

import numpy as np
import pytest

from dotmoe.bench.process_memory import forget_peak, peak_bytes, resident_bytes
from dotmoe.bench.timing import Timing, quantile, ratio_quartiles


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_quantiles_are_those_of_numpy(count):
    values = sorted(np.random.default_rng(count).random(count).tolist())
    for share in (0.0, 0.1, 0.25, 0.9, 1.0):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)


def test_timing_is_over_the_steps_of_all_rounds():
    seconds = np.random.default_rng(0).random((3, 8))
    timing = Timing.of(seconds.tolist())
    assert timing.samples == 24
    assert timing.best_decile_s == pytest.approx(np.quantile(seconds, 0.1))
    assert timing.median_s == pytest.approx(np.median(seconds))
    assert timing.worst_decile_s == pytest.approx(np.quantile(seconds, 0.9))


def test_a_slow_spell_of_both_models_does_not_move_the_ratio_of_rounds():
    dense = [[2.0, 2.0], [20.0, 20.0], [4.0, 4.0]]
    moe = [[1.0, 1.0], [10.0, 10.0], [2.0, 2.0]]
    assert ratio_quartiles(dense, moe) == (2.0, 2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells no peak that can be reset")
def test_a_peak_is_seen_and_forgotten():
    forget_peak()
    start = peak_bytes()
    block = np.ones(64 << 20, dtype=np.uint8)
    held = resident_bytes()
    assert peak_bytes() - start > 60 << 20
    assert held - start > 60 << 20
    del block
    assert peak_bytes() - start > 60 << 20
    forget_peak()
    if peak_bytes() - start > 60 << 20:
        pytest.skip("this system does not let a process reset its peak")
    assert peak_bytes() - start < 30 << 20
