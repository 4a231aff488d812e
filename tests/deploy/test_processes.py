"""Child processes of `make run` and `make demo`."""

import os
import sys
import threading
from pathlib import Path

import pytest

from deploy.processes import Process

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"


class Log:
    """Lines as they come, and an event for the first."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.first = threading.Event()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self.first.set()


@pytest.fixture
def log() -> Log:
    """Where the child's lines end."""
    return Log()


def _child(log: Log, code: str, **env: str) -> Process:
    command = [sys.executable, "-u", "-c", code]
    return Process("child", command, log, cwd=Path.cwd(), env=env)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_every_line_of_a_child_is_passed_on_under_its_name(log: Log):
    child = _child(log, "import os, sys; print(os.environ['A']); print('two', file=sys.stderr)", A="one")
    while child.exit_status is None:
        log.first.wait(0.1)
    assert child.stop(grace_s=5) == 0
    assert log.lines == [("child", "one"), ("child", "two")]


def test_a_child_is_asked_to_end(log: Log):
    child = _child(
        log, "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('up'); time.sleep(60)"
    )
    assert log.first.wait(20)
    assert child.stop(grace_s=20) == 3
    assert _is_gone(child.pid)


def test_a_child_that_does_not_end_is_killed(log: Log):
    child = _child(log, STUBBORN)
    assert log.first.wait(20)
    assert child.stop(grace_s=0.1) == -9
    assert _is_gone(child.pid)


def test_ctrl_c_does_not_reach_a_child_by_itself(log: Log):
    child = _child(log, "import os; print(os.getsid(0) == os.getpid())")
    while child.exit_status is None:
        log.first.wait(0.1)
    child.stop(grace_s=5)
    assert log.lines == [("child", "True")]
