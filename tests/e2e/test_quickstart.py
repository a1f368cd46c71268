"""`dotmoe quickstart`: two runs that differ in the split alone, and what must come out."""

import dataclasses

import pytest

from dotmoe.progress import Progress
from dotmoe.quickstart import QuickstartConfig, quickstart, run_configs


def test_the_two_runs_train_as_long_from_the_same_kind_of_router():
    random, learned = (config.settled() for config in run_configs(QuickstartConfig()).values())
    assert (random.baseline.split_router, learned.calibrate.start) == ("ridge", "data")
    assert dataclasses.replace(random.align, learn_assignment=True) == learned.align
    differ = {"out", "method", "baseline", "align"}
    for field in dataclasses.fields(learned):
        one, other = getattr(random, field.name), getattr(learned, field.name)
        assert field.name in differ or one == other


@pytest.mark.slow
def test_the_learned_split_loses_half_of_what_the_random_one_loses(tmp_path):
    made = quickstart(QuickstartConfig(out=str(tmp_path / "quick")), Progress(quiet=True))
    for level, bound in (("", 0.36), ("_repaired", 0.18)):
        random, learned = (
            made[name + level]["loss"] - made["dense"]["loss"]
            for name in ("random_split", "dot_moe")
        )
        assert 0 < learned < bound
        assert learned < 0.75 * random
    assert made["verification"]["top1_agreement"] > 0.95
