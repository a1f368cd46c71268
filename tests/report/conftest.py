"""Run folders made by hand."""

import pytest
from written_runs import write_quickstart, write_run

from dotmoe.report import html_report
from dotmoe.report.plots import draw_all
from dotmoe.report.result_files import read_run


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    """A run of which everything was measured, with its page; not to be changed."""
    run = write_run(tmp_path_factory.mktemp("full") / "run")
    html_report(run)
    return run


@pytest.fixture(scope="session")
def drawn_again(full):
    """Its plots, drawn a second time."""
    pytest.importorskip("matplotlib")
    return draw_all(read_run(full), in_pixels=False)


@pytest.fixture
def measured_run(tmp_path):
    """A run of which everything was measured."""
    return write_run(tmp_path / "run")


@pytest.fixture
def bare_run(tmp_path):
    """A run of which nothing was measured after its end."""
    return write_run(tmp_path / "bare", measured=False)


@pytest.fixture
def finetuned_run(tmp_path):
    """A run of `dotmoe finetune`."""
    return write_run(tmp_path / "finetuned", measured=False, finetuned=True)


@pytest.fixture
def quickstart_folder(tmp_path):
    """What `dotmoe quickstart` leaves behind, as far as a report reads it."""
    return write_quickstart(tmp_path / "quick")
