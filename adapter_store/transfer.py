"""The bytes of one remote file -> one local file: resumed, bounded in size and time, and no more than was promised."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from adapter_store.errors import Cause, rejected
from loraplex.errors import SourceUnavailable

_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.2
_REPORT_EVERY_S = 0.1

# (bytes so far, bytes in all or 0)
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Limits:
    """What a download may take."""

    max_file_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class Body:
    """A file on its way, from byte `start` on. `size_bytes` is that of the whole file, None where it is not stated."""

    start: int
    size_bytes: int | None
    chunks: Iterator[bytes]


class RemoteFile(Protocol):
    """One file at a source, whose content cannot change under it."""

    def open(self, start: int) -> AbstractContextManager[Body]:
        """The bytes from `start` on, or all of them where the source has no ranges. Raises BrokenOff when it is worth
        to go on later, and any other ServiceError when it is not."""


class BrokenOff(SourceUnavailable):
    """The source broke off or is busy: what has arrived so far is right, and the rest may follow."""


class WrongBytes(SourceUnavailable):
    """The source delivers something else than it stated: what has arrived so far is worth nothing."""


class Watch:
    """The limits of one transfer, asked after every chunk; tells `report` from time to time."""

    def __init__(self, limits: Limits, report: Report, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._limits, self._report, self._is_stopped = limits, report, is_stopped
        self.deadline_s = time.monotonic() + limits.timeout_s
        self._reported_s = 0.0

    def check_size(self, size_bytes: int) -> None:
        """Raise FILE_TOO_LARGE for more than is read."""
        if size_bytes > self._limits.max_file_bytes:
            most = self._limits.max_file_bytes
            raise rejected(Cause.FILE_TOO_LARGE, f"The file has {size_bytes} bytes or more; at most {most} are read.")

    def check_time(self) -> None:
        """Raise SourceUnavailable when the deadline has passed or the store stops; what has arrived is kept."""
        if self._is_stopped():
            raise SourceUnavailable("The store is shutting down.", remedy="Ask again when it is back.")
        if time.monotonic() > self.deadline_s:
            message = f"The download took longer than {self._limits.timeout_s:g} s."
            raise SourceUnavailable(message, remedy="Try again: it goes on from there. Or raise download_timeout_s.")

    def tell(self, received: int, total: int) -> None:
        """Report the progress, not too often."""
        now_s = time.monotonic()
        if received == total or now_s - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = now_s
            self._report(received, total)


def transfer(remote: RemoteFile, into: BinaryIO, size_bytes: int, watch: Watch, grow: Callable[[int], None]) -> None:
    """Complete `into`, which holds the first bytes of `remote` and stands at its end.

    `size_bytes` is what the source stated before, 0 where it did not. `grow` hears of the bytes that are about to be
    written, and may raise. A source that breaks off is asked to go on, a few times. Raises BrokenOff, WrongBytes,
    FILE_TOO_LARGE, SourceUnavailable, and what `remote` raises.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _attempt(remote, into, size_bytes, watch, grow)
        except BrokenOff:
            pause_s = _FIRST_PAUSE_S * 2**attempt
            if attempt == _ATTEMPTS - 1 or time.monotonic() + pause_s > watch.deadline_s:
                raise
            time.sleep(pause_s)
            watch.check_time()


def _attempt(remote: RemoteFile, into: BinaryIO, size_bytes: int, watch: Watch, grow: Callable[[int], None]) -> None:
    received = into.tell()
    if size_bytes and received == size_bytes:
        return
    with remote.open(received) as body:
        if body.start != received:
            received = body.start
            into.seek(received)
            into.truncate()
        stated = _stated(body, size_bytes)
        watch.check_size(stated)
        grow(stated - received)
        for chunk in body.chunks:
            received += len(chunk)
            watch.check_size(received)
            if stated and received > stated:
                raise WrongBytes(f"The source sent more than the {stated} bytes that it stated.", remedy=_TRY_AGAIN)
            watch.check_time()
            into.write(chunk)
            watch.tell(received, stated)
    if stated and received < stated:
        raise BrokenOff(f"The source sent {received} of {stated} bytes.", remedy=_TRY_AGAIN, retry_after_s=10.0)


def _stated(body: Body, size_bytes: int) -> int:
    """The size of the file, 0 where nobody states it."""
    if size_bytes and body.size_bytes not in (None, size_bytes):
        message = f"The source stated {size_bytes} bytes before, and {body.size_bytes} now."
        raise WrongBytes(message, remedy=_TRY_AGAIN, retry_after_s=10.0)
    return size_bytes or body.size_bytes or 0


_TRY_AGAIN = "Try again later; if it stays so, the source is broken."
