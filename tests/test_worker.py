"""An object in a child process: its errors arrive as one line."""

import pytest

from dotmoe.common.errors import UserError
from dotmoe.common.worker import Worker, WorkerDiedError


class Subject:
    """Lives in the child; the import path is handed down."""

    def double(self, number):
        print("this goes to a file")
        return 2 * number

    def refuse(self):
        raise UserError("this cannot be done.")

    def fail(self):
        raise ValueError("a defect")


def test_methods_answer_and_refusals_arrive():
    with Worker(f"{__name__}:Subject", name="subject") as worker:
        assert worker.ask("double", 4) == 8
        with pytest.raises(UserError, match=r"^this cannot be done\.$"):
            worker.ask("refuse")


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        ("os:abort", (), "ended with SIGABRT .* An assertion failed"),
        ("signal:raise_signal", (4,), "ended with SIGILL .* built for another machine"),
        ("signal:raise_signal", (9,), "ended with SIGKILL .* memory"),
        ("os:_exit", (3,), r"ended with status 3 \(no output\). Export the file again"),
    ],
)
def test_a_death_is_reported_as_what_it_is(target, arguments, words):
    with pytest.raises(WorkerDiedError, match=words) as caught:
        Worker(target, *arguments, name="llama.cpp", remedy="Export the file again.")
    assert "\n" not in str(caught.value)


def test_an_exception_names_itself_and_keeps_its_traceback():
    worker = Worker(f"{__name__}:Subject", name="subject")
    with pytest.raises(WorkerDiedError, match=r"status 1 \(.*ValueError: a defect") as caught:
        worker.ask("fail")
    assert "Traceback" in caught.value.__notes__[0]
