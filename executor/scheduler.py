"""Which requests are admitted, which of them starts next, and which pending denoiser calls run as one batch.

Pure: no clock, no device.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from loraplex.errors import QueueFull

J = TypeVar("J", bound=Hashable)


class Admission:
    """Counts unfinished requests and refuses those above the limit."""

    def __init__(self, max_queue_length: int) -> None:
        self.max_queue_length = max_queue_length
        self._unfinished: set[Hashable] = set()
        self._mean_seconds = 1.0

    def __repr__(self) -> str:
        return f"Admission({len(self)}/{self.max_queue_length})"

    def __len__(self) -> int:
        return len(self._unfinished)

    def admit(self, job: Hashable) -> int:
        """Admit a job and return how many are ahead of it. Raises QueueFull, having changed nothing."""
        ahead = len(self)
        if ahead >= self.max_queue_length:
            raise QueueFull(
                f"{ahead} requests are unfinished, which is the limit.",
                remedy="Try again after the delay in RetryInfo, or add executors.",
                retry_after_s=max(0.1, self._mean_seconds),
            )
        self._unfinished.add(job)
        return ahead

    def leave(self, job: Hashable, seconds: float) -> None:
        """The job is finished, for better or worse, `seconds` after its admission."""
        self._unfinished.remove(job)
        self._mean_seconds += 0.2 * (seconds - self._mean_seconds)


@dataclass
class _Waiting:
    """`turn` is the time of arrival, moved by the priority; `passed` counts the later ones that started before it."""

    turn: float
    passed: int = 0


class StartQueue(Generic[J]):
    """Jobs that wait to start, and which of them is next.

    They start in the order of their arrival, where one step of priority counts as `head_start_s` of waiting: so no
    priority starves. A job that does not fit now may be passed by later ones that do, by at most `max_passes` of them;
    then all wait for it. Hence a job that arrives behind n others starts after at most n + max_passes starts and those
    of higher priority that arrive within the head start.
    """

    def __init__(self, head_start_s: float = 10.0, max_passes: int = 8) -> None:
        self._head_start_s, self._max_passes = head_start_s, max_passes
        self._waiting: dict[J, _Waiting] = {}

    def __repr__(self) -> str:
        return f"StartQueue({len(self)})"

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[J]:
        return iter(self._in_turn())

    def add(self, job: J, arrived: float, priority: int = 0) -> None:
        """`job` waits from `arrived` on, in seconds; `priority` is above 0 for what should start earlier."""
        self._waiting[job] = _Waiting(arrived - priority * self._head_start_s)

    def remove(self, job: J) -> None:
        """`job` waits no longer, and did not start."""
        del self._waiting[job]

    def next(self, fits: Callable[[J], bool]) -> J | None:
        """Take the job that starts now, None when all have to wait. `fits` says whether a job can start."""
        ahead: list[_Waiting] = []
        for job in self._in_turn():
            if fits(job):
                del self._waiting[job]
                for passed in ahead:
                    passed.passed += 1
                return job
            ahead.append(self._waiting[job])
            if ahead[-1].passed >= self._max_passes:
                return None
        return None

    def _in_turn(self) -> list[J]:
        return sorted(self._waiting, key=lambda job: self._waiting[job].turn)


class StepTimes:
    """The shortest time that a denoising step ever took, by kind of job: no promise, but a bound for hopeless ones."""

    def __init__(self) -> None:
        self._shortest: dict[Hashable, float] = {}

    def observe(self, kind: Hashable, seconds: float) -> None:
        """A step of a job of this kind took `seconds`."""
        self._shortest[kind] = min(seconds, self._shortest.get(kind, seconds))

    def at_least(self, kind: Hashable, steps: int) -> float:
        """`steps` steps have never taken less than this, in seconds; 0 when the kind is not known."""
        return steps * self._shortest.get(kind, 0.0)


@dataclass(frozen=True)
class PendingCall:
    """A denoiser call that waits: calls with equal keys can share a batch."""

    key: Hashable
    samples: int
    arrived: float


@dataclass(frozen=True)
class Batch:
    """Run these samples now: (position of the call among the pending ones, how many of its samples)."""

    shares: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Wait:
    """Nothing to run before `until`, unless another call arrives."""

    until: float


@dataclass(frozen=True)
class BatchPolicy:
    """Oldest call first, with as many like it as the largest batch size holds."""

    batch_sizes: tuple[int, ...]
    wait_s: float

    def decide(self, pending: Sequence[PendingCall], jobs_between_steps: int, now: float) -> Batch | Wait:
        """What to run out of `pending`, which is not empty and is in order of arrival.

        While jobs are between two steps, and so about to call again, the oldest call waits for them up to `wait_s`
        if they could fill its batch.
        """
        oldest = pending[0]
        mates = [position for position, call in enumerate(pending) if call.key == oldest.key]
        available = sum(pending[position].samples for position in mates)
        if available < self.batch_sizes[-1] and jobs_between_steps and now < oldest.arrived + self.wait_s:
            return Wait(oldest.arrived + self.wait_s)
        return Batch(self._shares([(position, pending[position].samples) for position in mates], available))

    def _shares(self, mates: list[tuple[int, int]], available: int) -> tuple[tuple[int, int], ...]:
        """The largest batch of whole calls, the oldest among them; else as much of the oldest as makes a batch.

        Whole, so that the two halves of classifier-free guidance run together.
        """
        for size in sorted((size for size in self.batch_sizes if size <= available), reverse=True):
            shares, left = [], size
            for position, samples in mates:
                if samples <= left:
                    shares.append((position, samples))
                    left -= samples
            if not left and shares[0] == mates[0]:
                return tuple(shares)
        position, samples = mates[0]
        return ((position, max(size for size in self.batch_sizes if size <= samples)),)
