"""The device thread: starts jobs, gives adapters their rows, and runs what the jobs' pipelines ask for.

It alone touches the row allocator, the arena, the row table and the model. A job is a diffusers pipeline call on a
thread of its own; whatever that asks of a component arrives here as a ModelCall.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

import structlog
import torch

from executor import metrics
from executor.adapters import Fetched
from executor.arena import Arena, RowTable
from executor.calls import CallQueue, Shares
from executor.denoiser import Method, ModelCall, intercept, run_batch
from executor.errors import NoFreeRows
from executor.images import encode
from executor.jobs import AdapterReady, Event, Failed, Finished, ImageDone, Job, StepDone
from executor.pipeline import BasePipeline, compiled_graphs
from executor.residency import Residency, ResidentAdapter
from executor.scheduler import BatchPolicy
from loraplex.errors import InternalError, ServiceError, ShuttingDown

T = TypeVar("T")

_log = structlog.stdlib.get_logger("loraplex.engine")


class Run:
    """A job from its submission to its end; `active` are the rows that its samples use, with their strengths."""

    def __init__(self, job: Job, fetched: Sequence[Fetched]) -> None:
        self.job = job
        self.fetched = fetched
        self.ready: tuple[AdapterReady, ...] = ()
        self.active: tuple[tuple[int, float], ...] = ()
        self.started_at = 0.0
        self.first_step_at: float | None = None
        self.last_step_at = 0.0
        self.between_steps = False
        self.graphs_before = 0

    def __repr__(self) -> str:
        return f"Run({self.job!r}, rows={len(self.active)}, between_steps={self.between_steps})"

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


_current_run: ContextVar[Run] = ContextVar("loraplex_run")


class Engine:
    """Runs jobs on one device. `submit`, `call` and `close` may be called from any thread."""

    def __init__(
        self,
        base: BasePipeline,
        arena: Arena,
        table: RowTable,
        policy: BatchPolicy,
        *,
        denoise: Callable[..., Any],
        max_running_jobs: int,
    ) -> None:
        """`arena` and `table` are attached to the components of `base`; `denoise` is its denoiser, compiled or not."""
        self._base = base
        self._table = table
        self._max_running_jobs = max_running_jobs
        self._residency = Residency(arena)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Run] = deque()
        self._running: set[Run] = set()
        self._calls = CallQueue(policy, lambda: sum(run.between_steps for run in self._running))
        self._closing = False
        self._intercept(denoise)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Engine(waiting={len(self._waiting)}, running={len(self._running)}, {self._residency.rows!r})"

    def submit(self, job: Job, fetched: Sequence[Fetched]) -> None:
        """Run `job` with these adapters, one per choice of the job. Its events end with Finished or Failed."""
        self._inbox.put(lambda: self._waiting.append(Run(job, fetched)))

    def call(self, function: Callable[[], T]) -> T:
        """`function()` on the device thread, between two steps; blocks until it is done."""
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised again on the caller's thread
                done.set_exception(error)

        self._inbox.put(work)
        return done.result()

    def residents(self) -> tuple[list[ResidentAdapter], int]:
        """The adapters in the rows, most recently used first, and the number of free rows."""
        return self.call(self._residency.residents)

    def close(self) -> None:
        """End the thread. Jobs that are not finished fail with ShuttingDown."""
        self._inbox.put(lambda: setattr(self, "_closing", True))
        self._thread.join()

    def _intercept(self, denoise: Callable[..., Any]) -> None:
        family = self._base.family
        for name, component in self._base.components.items():
            method_name = "decode" if name == "vae" else "forward"
            is_denoiser = name == family.denoiser
            function = denoise if is_denoiser else getattr(component, method_name)
            batched = family.batched if is_denoiser else frozenset()
            intercept(component, method_name, Method(name, function, batched), self._hand_off)

    # On the jobs' threads.

    def _hand_off(self, method: Method, arguments: dict[str, Any]) -> Any:
        run = _current_run.get()
        if error := run.job.over():
            raise error
        call = ModelCall(run, method, arguments)
        if method.batched:
            run.first_step_at = run.first_step_at or time.monotonic()
            _ = call.key  # computed here, not on the device thread
        self._inbox.put(lambda: self._arrive(call))
        return call.result.result()

    def _work(self, run: Run) -> None:
        _current_run.set(run)
        try:
            self._generate(run)
            outcome: Event | None = None
        except ServiceError as error:
            outcome = Failed(error)
        except Exception:  # noqa: BLE001 - the boundary of a job: whatever a pipeline raises ends this job only
            _log.exception("job failed", request_id=run.job.request_id)
            outcome = Failed(InternalError("The executor failed.", remedy="Its log has the details."))
        self._inbox.put(lambda: self._end(run, outcome or run.finished()))

    def _generate(self, run: Run) -> None:
        parameters = run.job.parameters

        def on_step(step: int) -> None:
            run.last_step_at = time.monotonic()
            run.job.emit(StepDone(step))

        images = self._base.generate(parameters, on_step)
        for index, image in enumerate(images):
            seed = parameters.seed + index
            run.job.emit(ImageDone(index, encode(image, parameters, run.ready, seed), seed))
            metrics.IMAGES.inc()

    # On the device thread.

    @torch.no_grad()
    def _loop(self) -> None:
        while self._running or not self._closing:
            try:
                self._take_messages()
                if self._closing:
                    self._fail_all(ShuttingDown("The executor is shutting down.", remedy="Ask another replica."))
                self._start_waiting()
                self._run_next()
            except Exception:  # noqa: BLE001 - the engine's loop: it must outlive whatever happens in one turn
                _log.exception("engine turn failed")
                self._fail_all(InternalError("The executor failed.", remedy="Its log has the details."))

    def _take_messages(self) -> None:
        timeout = self._calls.idle_seconds()
        try:
            message = self._inbox.get(timeout=timeout) if timeout is None or timeout > 0 else self._inbox.get_nowait()
            while True:
                message()
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _arrive(self, call: ModelCall) -> None:
        call.run.between_steps = False
        self._calls.add(call)

    def _start_waiting(self) -> None:
        for run in [run for run in self._waiting if run.job.over()]:
            self._waiting.remove(run)
            run.job.emit(Failed(run.job.over() or InternalError("not over")))
        while self._waiting and len(self._running) < self._max_running_jobs:
            run = self._waiting[0]
            try:
                run.ready, run.active = self._residency.give(run.job, run.fetched)
            except NoFreeRows:
                break  # a running job will unpin some: nothing waits while nothing runs
            except Exception:  # noqa: BLE001 - a load that fails ends this job and leaves every other adapter as it was
                _log.exception("load failed", request_id=run.job.request_id)
                self._waiting.popleft()
                run.job.emit(Failed(InternalError("An adapter could not be loaded.", remedy="Try again.")))
                continue
            self._waiting.popleft()
            self._begin(run)
        self._observe()

    def _begin(self, run: Run) -> None:
        run.started_at = time.monotonic()
        run.graphs_before = compiled_graphs()
        self._running.add(run)
        for ready in run.ready:
            run.job.emit(ready)
        threading.Thread(target=self._work, args=(run,), name=f"job-{run.job.request_id}", daemon=True).start()

    def _end(self, run: Run, outcome: Event) -> None:
        self._running.discard(run)
        self._residency.take_back(run.ready)
        if isinstance(outcome, Finished):
            metrics.RECOMPILATIONS.inc(outcome.recompilations)
        self._observe()
        run.job.emit(outcome)

    def _run_next(self) -> None:
        self._calls.drop_ended()
        if solo := self._calls.take_solo():
            self._run_solo(solo)
        elif shares := self._calls.take_batch():
            self._run_shared(shares)
            self._calls.settle()

    def _run_solo(self, call: ModelCall) -> None:
        try:
            self._table.select([call.run.active] * len(self._table.row_index))
            call.result.set_result(call.method.function(**call.arguments))
        except Exception as error:  # noqa: BLE001 - raised again on the job's thread
            call.result.set_exception(error)

    def _run_shared(self, shares: Shares) -> None:
        samples = [call.run.active for call, count in shares for _ in range(count)]
        try:
            self._table.select(samples)
            run_batch(shares)
        except Exception as error:  # noqa: BLE001 - raised again on the jobs' threads
            for call, _ in shares:
                call.result.set_exception(error)
        metrics.STEPS.inc(len(samples))
        metrics.BATCHES.labels(len(samples)).inc()
        for call, _ in shares:
            call.run.between_steps = call.result.done()

    def _fail_all(self, error: ServiceError) -> None:
        self._calls.fail_all(error)
        for run in self._waiting:
            run.job.emit(Failed(error))
        self._waiting.clear()

    def _observe(self) -> None:
        metrics.RUNNING_JOBS.set(len(self._running))
        self._residency.observe()
