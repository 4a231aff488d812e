"""Which requests are admitted, and which pending denoiser calls run next as one batch. Pure: no clock, no device."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from loraplex.errors import QueueFull


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
        left = max(size for size in self.batch_sizes if size <= available)
        shares = []
        for position in mates:
            take = min(left, pending[position].samples)
            if take:
                shares.append((position, take))
            left -= take
        return Batch(tuple(shares))
