"""How a backend calls loraplex: one deadline for all attempts, retries that make sense, progress, errors, cancellation.

python examples/backend.py        # while `make run` runs; LORAPLEX_EXECUTOR names another executor
"""

# ruff: noqa: T201

import itertools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from loraplex import AdapterReady, Client, Event, GenerateOptions, Preview, Result, StepDone
from loraplex.errors import Cancelled, ServiceError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0


def is_worth_a_retry(error: ServiceError) -> bool:
    """Whether the same request may succeed later: the service says when, or was not there."""
    return error.retry_after_s is not None or error.code == "UNAVAILABLE"


def draw(
    client: Client,
    prompt: str,
    options: GenerateOptions,
    *,
    request_id: str,
    within_s: float = 60.0,
    on_event: Callable[[Event], None] = lambda _: None,
) -> Result:
    """One image, within `within_s` seconds whatever happens. Raises the last ServiceError.

    The seed is chosen here, so that every attempt makes the same image; the id stays the same in all logs.
    """
    seed, deadline = random.randrange(2**31), time.monotonic() + within_s
    for attempt in itertools.count():
        try:
            left_s = max(0.001, deadline - time.monotonic())
            attempted: GenerateOptions = {**options, "seed": seed, "request_id": request_id, "timeout_s": left_s}
            with client.generate(prompt, **attempted) as events:
                return Result.of(_told(event, on_event) for event in events)
        except ServiceError as error:
            pause_s = _pause_s(error, attempt)
            if not is_worth_a_retry(error) or time.monotonic() + pause_s >= deadline:
                raise
            time.sleep(pause_s)
    raise AssertionError("count() does not end")


def show(event: Event) -> None:
    """One line for what a user would see of it."""
    match event:
        case AdapterReady():
            print(f"adapter {event.ref}: rank {event.rank}, from {event.ready_from}")
        case Preview():
            print(f"preview after step {event.step}: {event.to_pil().size[0]} px wide")
        case StepDone() if event.step == event.num_inference_steps:
            print(f"{event.step} steps done")


def main() -> None:
    """An image; then what three failures look like."""
    with Client() as client:
        wanted: GenerateOptions = {"adapters": {"sketch": 0.8}, "preview_every_steps": 4}
        result = draw(client, "a cat on a blue background", wanted, request_id="backend-1", on_event=show)
        Path("backend.png").write_bytes(result.encoded[0].data)
        print(f"backend.png, {result.summary.steps} steps, {result.summary.recompilations} recompilations")
        for prompt, adapter in (("a cat", "no-such-adapter"), ("", "sketch")):
            try:
                draw(client, prompt, {"adapters": [adapter]}, request_id="backend-2")
            except ServiceError as error:
                where = f" (field {error.field})" if error.field else ""
                print(f"{error.code} {error.reason}{where}: {error.message}")
        events = client.generate("a dog on a red background", num_inference_steps=100, request_id="backend-3")
        next(events)  # it is admitted now
        client.cancel("backend-3")  # from this process or any other; events.close() does it from here
        try:
            Result.of(events)
        except Cancelled as error:
            print(f"{error.code} {error.reason}: {error.message}")


def _told(event: Event, on_event: Callable[[Event], None]) -> Event:
    on_event(event)
    return event


def _pause_s(error: ServiceError, attempt: int) -> float:
    """What the service asks for, or twice the last pause; a random part more, so that not all come back at once."""
    wanted_s = error.retry_after_s or min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
    return wanted_s * random.uniform(1.0, 1.5)


if __name__ == "__main__":
    try:
        main()
    except ServiceError as error:
        sys.exit(f"{error.reason}: {error}")
