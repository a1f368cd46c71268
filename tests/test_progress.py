"""Lines and bars on standard error. Oracle: the text itself."""

import sys
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


def test_what_is_done_at_once_after_a_long_time_is_not_fast(clock, capsys):
    """Documents are tokenised many at a time, and then counted one by one."""
    with Progress().bar("tokenise", tokens=1) as update:
        update(0, 1000)
        for batch in range(10):
            clock.now += 20
            for piece in range(10):
                update(100 * batch + 10 * (piece + 1), 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "tokenise: 1,000 of 1,000, 5 tokens/s"


def test_a_new_count_has_its_own_time(clock, capsys):
    with Progress().bar("evaluate", tokens=10) as update:
        for seconds in (1, 4):
            for step in range(5):
                update(step, 4)
                clock.now += seconds
    assert [line for line in capsys.readouterr().err.splitlines() if "4 of 4" in line] == [
        "evaluate: 4 of 4, 10 tokens/s",
        "evaluate: 4 of 4, 2 tokens/s",
    ]


def test_a_notebook_shows_one_bar_that_moves(clock, monkeypatch):
    shown = []
    display = SimpleNamespace(update=shown.append)
    notebook = SimpleNamespace(HTML=str, display=lambda *_, **__: display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=notebook))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    progress = Progress()
    progress.console.is_jupyter = True
    with progress.bar("<align>") as update:
        for step in range(1, 11):
            update(step, 10, "kl 1")
            clock.now += 0.1
    values = [int(text.split('value="')[1].split('"')[0]) for text in shown]
    assert values == [1, 4, 7, 10]
    assert shown[-1].startswith('<progress value="10" max="10"></progress> &lt;align&gt;: 10 of 10')
    progress.console.quiet = True
    with progress.bar("quiet") as update:
        update(1, 1)
    assert len(shown) == 4


def test_a_time_without_end_is_shown_all_the_same():
    pace = progress_module._Pace(0)
    pace.done = 1
    assert pace.left(10**40).endswith("left")
