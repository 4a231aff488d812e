"""The gate: which calls are let in, and when the last of them has left. Pure bookkeeping on the event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.errors import ServiceUnavailable, ShuttingDown


class Gate:
    """Closed until `open`; after `drain` it lets nobody in, while those inside may stay."""

    def __init__(self) -> None:
        self._state = "warming up"
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"Gate({self._state}, {self._inside} inside)"

    def open(self) -> None:
        """Let calls in."""
        self._state = "open"

    def drain(self) -> None:
        """Let no more calls in, for ever."""
        self._state = "draining"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold a place inside; ServiceUnavailable before the start, ShuttingDown while draining."""
        if self._state == "draining":
            raise ShuttingDown("The service is shutting down.", remedy="Ask another replica.", retry_after_s=1.0)
        if self._state != "open":
            raise ServiceUnavailable("The service is warming up.", remedy="Wait for its health.", retry_after_s=1.0)
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def empty(self) -> None:
        """Return when nobody is inside."""
        await self._empty.wait()
