"""Lines and bars on standard error. Oracle: the text itself."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from dotmoe.common import progress as progress_module
from dotmoe.common.progress import Progress


@pytest.mark.parametrize("text", ["pip install -e '.[baselines]'", "x[/y].txt", "[bold]", "a\\[b"])
def test_text_is_printed_as_it_is(text, capsys):
    for progress in (Progress(), Progress(quiet=True)):
        progress.log(text)
        with progress.bar(text) as update:
            update(1, 1, text)
    assert capsys.readouterr().err == f"{text}\n{text}: 1 of 1, {text}\n"


@pytest.fixture
def clock(monkeypatch):
    """Stands still until a test moves it: `clock.now += 5`."""
    fake = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: fake.now)
    return fake


def test_without_a_terminal_lines_tell_speed_and_time_left(clock, capsys):
    with Progress().bar("align", tokens=64) as update:
        for step in range(11, 101):  # it goes on from step 10
            update(step, 100, "kl 1")
            clock.now += 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "align: 11 of 100, kl 1",
        "align: 16 of 100, 32 tokens/s, 0:02:48 left, kl 1",
        "align: 21 of 100, 32 tokens/s, 0:02:38 left, kl 1",
    ]
    assert lines[-1] == "align: 100 of 100, 32 tokens/s, kl 1"


def test_lines_become_rarer_as_the_work_goes_on(clock, capsys):
    with Progress().bar("layers") as update:
        for minute in range(24 * 60 + 1):
            update(minute, 24 * 60)
            clock.now += 60
    lines = capsys.readouterr().err.splitlines()
    minutes = [int(line.split()[1].replace(",", "")) for line in lines]
    gaps = [later - earlier for earlier, later in pairwise(minutes)]
    assert gaps[:10] == [1] * 10
    assert (max(gaps), gaps[-2]) == (5, 5)
    assert "tokens" not in "".join(lines)


def test_the_next_model_is_counted_anew(clock, capsys):
    with Progress().bar("evaluate", tokens=1) as update:
        for seconds, done in [(0, 100), (20, 200), (50, 50), (10, 150), (5, 200)]:
            clock.now += seconds
            update(done, 200)
    assert capsys.readouterr().err.splitlines() == [
        "evaluate: 100 of 200",
        "evaluate: 200 of 200, 5 tokens/s",
        "evaluate: 50 of 200",
        "evaluate: 150 of 200, 10 tokens/s, 0:00:05 left",
        "evaluate: 200 of 200, 10 tokens/s",
    ]
