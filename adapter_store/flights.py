"""Single flight: however many ask for one key at a time, the work is done once. Event loop only."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Result = TypeVar("Result")
Progress = TypeVar("Progress")


class _Flight(Generic[Progress, Result]):
    def __init__(self, work: Callable[[Callable[[Progress], None]], Awaitable[Result]]) -> None:
        self.listeners: list[Callable[[Progress], None]] = []
        self.latest: Progress | None = None
        loop = asyncio.get_running_loop()

        async def fly() -> Result:
            return await work(lambda progress: _from_any_thread(loop, self._tell, progress))

        self.task = asyncio.create_task(fly())

    def _tell(self, progress: Progress) -> None:
        self.latest = progress
        for listener in tuple(self.listeners):
            listener(progress)


class Flights(Generic[Progress, Result]):
    """The work under way, by key."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[Progress, Result]] = {}

    def __repr__(self) -> str:
        return f"<Flights {len(self._flights)} under way>"

    async def join(
        self,
        key: Hashable,
        work: Callable[[Callable[[Progress], None]], Awaitable[Result]],
        report: Callable[[Progress], None],
    ) -> Result:
        """The result or the error of the work for `key`, started here unless it is under way.

        `work` gets a function to report progress with, from any thread; `report` is called on the event loop. A caller
        that is cancelled leaves; the work goes on for the others, and for the cache.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(work)
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        elif flight.latest is not None:
            report(flight.latest)
        flight.listeners.append(report)
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.listeners.remove(report)

    async def close(self) -> None:
        """Cancel what is under way, and wait for it to end."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: Hashable, task: "asyncio.Task[Result]") -> None:
        del self._flights[key]
        if not task.cancelled():
            task.exception()  # somebody may have asked for it and left: then nobody else looks at it


def _from_any_thread(loop: asyncio.AbstractEventLoop, tell: Callable[[Progress], None], progress: Progress) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(tell, progress)
