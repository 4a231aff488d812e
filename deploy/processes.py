"""Child processes that are ended in any case, by their process id, and whose output is read line by line."""

import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LogLine = Callable[[str, str], None]
"""Called with the name of the process and one line of its output, from a thread of its own."""


class Process:
    """A running child in a session of its own, so that Ctrl-C reaches only its parent, which then stops it in order."""

    def __init__(self, name: str, command: Sequence[str], log: LogLine, *, cwd: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self._child = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"Process({self.name}, pid {self._child.pid}, exit status {self.exit_status})"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._child.poll()

    def stop(self, grace_s: float) -> int:
        """Ask it to end, and kill it after `grace_s`, or when this call is interrupted; returns its exit status."""
        try:
            self._child.terminate()
            return self._child.wait(grace_s)
        except subprocess.TimeoutExpired:
            return self._killed()
        except BaseException:
            self._killed()
            raise
        finally:
            self._reader.join()

    def _killed(self) -> int:
        self._child.kill()
        return self._child.wait()

    def _read(self, log: LogLine) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                log(self.name, line.rstrip("\n"))
