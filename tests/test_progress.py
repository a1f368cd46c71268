"""Lines and bars on standard error. Oracle: the text itself."""

import pytest

from dotmoe.progress import Progress


@pytest.mark.parametrize("text", ["pip install 'dotmoe[analysis]'", "x[/y].txt", "[bold]", "a\\[b"])
def test_text_is_printed_as_it_is(text, capsys):
    progress = Progress()
    progress.log(text)
    with progress.bar(text) as update:
        update(1, 1, text)
    assert capsys.readouterr().err == f"{text}\n{text}: 1 of 1 {text}\n"


def test_without_a_terminal_a_bar_is_a_line_a_tenth(capsys):
    with Progress().bar("align") as update:
        for step in range(101):
            update(step, 100, "kl 1")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"align: {10 * tenth} of 100 kl 1" for tenth in range(11)]


def test_quiet_prints_nothing(capsys):
    progress = Progress(quiet=True)
    progress.log("text")
    with progress.bar("title") as update:
        update(1, 1)
    assert capsys.readouterr() == ("", "")
