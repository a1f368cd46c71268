"""`dotmoe` commands in real processes that need no second start: forks of this one."""

import os
import signal
import sys
import time
import traceback

from dotmoe.cli import run

PATIENCE_S = 240


class Forked:
    """A command that runs in a fork of this process; what it says is read with `said`."""

    def __init__(self, arguments):
        self.status = None
        self._said, writing = os.pipe()
        os.set_blocking(self._said, False)
        self.pid = os.fork()
        if self.pid == 0:
            _become(arguments, writing)
        os.close(writing)

    def said(self):
        """What it has written to either output since this was last asked."""
        try:
            return os.read(self._said, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def wait(self):
        """Exit status, negative after a signal."""
        while not self.has_ended():
            time.sleep(0.01)
        return self.status

    def has_ended(self):
        """Whether it is no longer there."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def is_there_when(self, reached):
        """Wait until a condition holds; False if the process ended before."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            if self.has_ended():
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.0005)
        return True

    def kill_when(self, reached, delay_s):
        """SIGKILL some time after a condition holds; False if the process ended before."""
        if not self.is_there_when(reached):
            return False
        time.sleep(delay_s)
        if self.has_ended():
            return False
        os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL


def _become(arguments, writing):
    """Run the command and end, without anything that this process would do at its end."""
    status = 99
    try:
        sys.stdout = sys.stderr = os.fdopen(writing, "w", buffering=1)
        status = run(arguments)
    except BaseException:  # noqa: BLE001  (the test shows it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
