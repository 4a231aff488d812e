"""What is said while the two services of `make run` start."""

import sys
import time
from pathlib import Path

import pytest

from deploy import local
from deploy.local import Running, StartFailed
from deploy.processes import Process


def _running(code: str) -> Running:
    child = Process("executor", [sys.executable, "-c", code], lambda *_: None, cwd=Path.cwd(), env={})
    return Running("", "", "", "", (child,))


def test_how_long_a_start_takes_is_said_again_and_again_until_it_is_too_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "_SAY_EVERY_S", 0.2)
    running = _running("import time; time.sleep(60)")
    said: list[float] = []
    try:
        with pytest.raises(StartFailed, match="was not serving in time"):
            for waited_s in local._waiting_until_serving("127.0.0.1:1", running, time.monotonic() + 3):
                said.append(waited_s)
    finally:
        running.processes[0].stop(5)
    assert said == sorted(said)
    assert len(said) >= 2


def test_a_service_that_ends_ends_the_wait():
    running = _running("raise SystemExit(3)")
    with pytest.raises(StartFailed, match="executor ended with status 3 before it was serving"):
        for _ in local._waiting_until_serving("127.0.0.1:1", running, time.monotonic() + 60):
            pass
    running.processes[0].stop(5)
