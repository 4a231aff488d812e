"""The events of a job on their way to its stream, bounded whatever its reader does. Event loop only."""

import asyncio
from collections import deque

from executor.jobs import Event, ImageDone, PreviewDone


class EventQueue:
    """First in, first out; of the previews of one image only the newest waits, and none once the image is there.

    So a reader that is slow, or stands still, costs the memory of the images that it asked for and no more.
    """

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._some = asyncio.Event()

    def __repr__(self) -> str:
        return f"EventQueue({len(self)})"

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, event: Event) -> None:
        """`event` waits; never blocks."""
        if isinstance(event, PreviewDone | ImageDone):
            self._drop_previews(event.index)
        self._waiting.append(event)
        self._some.set()

    async def get(self) -> Event:
        """The oldest event; waits until there is one. For one reader."""
        await self._some.wait()
        event = self._waiting.popleft()
        if not self._waiting:
            self._some.clear()
        return event

    def _drop_previews(self, index: int) -> None:
        stale = [event for event in self._waiting if isinstance(event, PreviewDone) and event.index == index]
        for event in stale:
            self._waiting.remove(event)
