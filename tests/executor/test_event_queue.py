"""The events of a job on their way to a reader that may stand still."""

import asyncio

from executor.event_queue import EventQueue
from executor.jobs import Event, ImageDone, PreviewDone, StepDone


async def everything(queue: EventQueue) -> list[Event]:
    return [await queue.get() for _ in range(len(queue))]


async def test_events_keep_their_order() -> None:
    queue = EventQueue()
    events = [StepDone(1), PreviewDone(1, 0, b"x"), StepDone(2), ImageDone(1, b"y", 7)]
    for event in events:
        queue.put(event)
    assert await everything(queue) == events


async def test_a_reader_waits_for_the_next_event() -> None:
    queue = EventQueue()
    reading = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not reading.done()
    queue.put(StepDone(1))
    assert await reading == StepDone(1)


async def test_of_the_previews_of_an_image_only_the_newest_waits() -> None:
    queue = EventQueue()
    for step in range(1, 1001):
        for index in range(4):
            queue.put(PreviewDone(step, index, b"x" * 1000))
    assert await everything(queue) == [PreviewDone(1000, index, b"x" * 1000) for index in range(4)]


async def test_a_preview_does_not_wait_behind_its_image() -> None:
    queue = EventQueue()
    for event in (PreviewDone(3, 0, b"x"), PreviewDone(3, 1, b"x"), ImageDone(0, b"image", 7)):
        queue.put(event)
    assert await everything(queue) == [PreviewDone(3, 1, b"x"), ImageDone(0, b"image", 7)]
