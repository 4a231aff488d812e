"""The model calls that wait for the device, and which of them runs next. Device thread only."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from executor.denoiser import ModelCall
from executor.scheduler import Batch, BatchPolicy, PendingCall, Wait
from loraplex.errors import ServiceError

Shares = Sequence[tuple[ModelCall, int]]


class CallQueue:
    """Calls of text encoders and the autoencoder go first, one by one, so that their jobs can join a batch."""

    def __init__(self, policy: BatchPolicy, jobs_between_steps: Callable[[], int]) -> None:
        """`jobs_between_steps()` says how many running jobs are about to call the denoiser again."""
        self._policy = policy
        self._jobs_between_steps = jobs_between_steps
        self._solo: deque[ModelCall] = deque()
        self._denoiser: list[ModelCall] = []

    def __repr__(self) -> str:
        return f"CallQueue(solo={len(self._solo)}, denoiser={len(self._denoiser)})"

    def add(self, call: ModelCall) -> None:
        """A job's pipeline called a component."""
        if call.method.batched:
            self._denoiser.append(call)
        else:
            self._solo.append(call)

    def idle_seconds(self) -> float | None:
        """How long there is nothing to run unless a call is added; None for ever."""
        if self._solo:
            return 0.0
        if not self._denoiser:
            return None
        decision = self._decide()
        return max(0.0, decision.until - time.monotonic()) if isinstance(decision, Wait) else 0.0

    def take_solo(self) -> ModelCall | None:
        """The oldest call that runs alone; it leaves the queue."""
        return self._solo.popleft() if self._solo else None

    def take_batch(self) -> Shares:
        """The samples to run now as one batch, none when it is better to wait; `settle` takes them off the queue."""
        if not self._denoiser:
            return ()
        decision = self._decide()
        if isinstance(decision, Wait):
            return ()
        return [(self._denoiser[position], count) for position, count in decision.shares]

    def settle(self) -> None:
        """Drop the denoiser calls that have their result."""
        self._denoiser = [call for call in self._denoiser if not call.result.done()]

    def drop(self, why: Callable[[Any], ServiceError | None]) -> None:
        """Fail the calls of runs that must not go on, before they cost a step; `why(run)` is the error."""
        self._fail(lambda call: why(call.run))

    def fail_all(self, error: ServiceError) -> None:
        """Fail every call with `error`."""
        self._fail(lambda call: error)

    def _fail(self, why: Callable[[ModelCall], ServiceError | None]) -> None:
        for call in [*self._solo, *self._denoiser]:
            if not call.result.done() and (error := why(call)):
                call.result.set_exception(error)
        self._solo = deque(call for call in self._solo if not call.result.done())
        self.settle()

    def _decide(self) -> Batch | Wait:
        pending = [PendingCall(call.key, call.samples_left, call.arrived) for call in self._denoiser]
        return self._policy.decide(pending, self._jobs_between_steps(), time.monotonic())
