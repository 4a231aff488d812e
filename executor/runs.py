"""A job from its submission to its end, as the engine sees it."""

import time
from collections.abc import Hashable, Sequence
from contextvars import ContextVar

from executor.adapters import Fetched
from executor.compilation import compiled_graphs
from executor.jobs import AdapterReady, Finished, Job
from executor.residency import ActiveRows, Held


class Run:
    """One job with its adapters; they are `held` in the rows from when it is staged until it ends."""

    def __init__(self, job: Job, fetched: Sequence[Fetched]) -> None:
        self.job = job
        self.fetched = fetched
        self.held: tuple[Held, ...] = ()
        self.ready: tuple[AdapterReady, ...] = ()
        self.steps_done = 0
        self.started_at = 0.0
        self.first_step_at: float | None = None
        self.last_step_at = 0.0
        self.between_steps = False
        self.graphs_before = 0

    def __repr__(self) -> str:
        return f"Run({self.job!r}, adapters={len(self.held)}, steps={self.steps_done})"

    @property
    def kind(self) -> Hashable:
        """Equal for jobs whose steps cost the same."""
        one = self.job.parameters
        every_step = one.preview_every_steps == 1  # the others have steps without a preview, too
        return one.width, one.height, one.num_images, one.num_frames, bool(one.negative_prompt), every_step

    @property
    def steps_left(self) -> int:
        """Denoising steps that are still to be done."""
        return self.job.parameters.num_steps - self.steps_done

    def is_loaded(self) -> bool:
        """Whether the loads of its adapters have ended, for better or worse."""
        return all(one.load is None or one.load.done() for one in self.held)

    def active(self, component: str) -> ActiveRows:
        """The rows that a call of `component` uses now, with their strengths."""
        progress = self.steps_done / self.job.parameters.num_steps
        return tuple(
            (row, one.choice.strength)
            for one in self.held
            if one.choice.applies(component, progress)
            for row in one.rows
        )

    def finished(self) -> Finished:
        """The summary of a run that did all that was asked."""
        now = time.monotonic()
        return Finished(
            adapters=self.ready,
            recompilations=compiled_graphs() - self.graphs_before,
            queue_seconds=self.started_at - self.job.admitted_at,
            denoise_seconds=self.last_step_at - (self.first_step_at or self.last_step_at),
            total_seconds=now - self.job.admitted_at,
        )


current_run: ContextVar[Run] = ContextVar("loraplex_run")
