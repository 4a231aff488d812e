"""The device thread: starts jobs, gives adapters their rows, and runs what the jobs' pipelines ask for.

It alone touches the row allocator, the row table and the model. A job waits for its turn, is staged (its adapters are
pinned, and loaded while others compute), and runs: a diffusers pipeline call on a thread of its own, and whatever that
asks of a component arrives here as a ModelCall.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog
import torch
from PIL.Image import Image

from executor import metrics
from executor.adapters import Fetched
from executor.arena import Arena, RowTable
from executor.calls import CallQueue, Shares
from executor.compilation import compiled_graphs
from executor.denoiser import Method, ModelCall, intercept, run_batch
from executor.images import encode, encode_preview
from executor.jobs import Event, Failed, Finished, ImageDone, Job, PreviewDone, StepDone
from executor.pipeline import BasePipeline
from executor.residency import Residency, ResidentAdapter
from executor.runs import Run, current_run
from executor.scheduler import BatchPolicy, StartQueue, StepTimes
from loraplex.errors import DeadlineExceeded, InternalError, ServiceError, ShuttingDown

T = TypeVar("T")

_log = structlog.stdlib.get_logger("loraplex.engine")


class Engine:
    """Runs jobs on one device. `submit`, `call` and `close` may be called from any thread."""

    def __init__(
        self,
        base: BasePipeline,
        arena: Arena,
        table: RowTable,
        policy: BatchPolicy,
        *,
        denoise: Mapping[str, Callable[..., Any]],
        max_running_jobs: int,
    ) -> None:
        """`arena` and `table` are attached to the components of `base`; `denoise` are its denoisers, compiled."""
        self._base = base
        self._table = table
        self._max_running_jobs = max_running_jobs
        self._residency = Residency(arena)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: StartQueue[Run] = StartQueue()
        self._staged: list[Run] = []
        self._running: set[Run] = set()
        self._step_times = StepTimes()
        self._calls = CallQueue(policy, lambda: sum(run.between_steps for run in self._running))
        self._closing = False
        self._closed = False
        self._closed_lock = threading.Lock()
        self._intercept(denoise)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"Engine(waiting={len(self._waiting)}, staged={len(self._staged)}, running={len(self._running)}, "
            f"{self._residency.rows!r})"
        )

    def submit(self, job: Job, fetched: Sequence[Fetched]) -> None:
        """Run `job` with these adapters, one per choice of the job. Its events end with Finished or Failed."""
        run = Run(job, fetched)
        if not self._post(lambda: self._waiting.add(run, job.admitted_at, job.priority)):
            job.emit(Failed(_shutting_down()))

    def call(self, function: Callable[[], T]) -> T:
        """`function()` on the device thread, between two steps; blocks until it is done. ShuttingDown when closed."""
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised again on the caller's thread
                done.set_exception(error)

        if not self._post(work):
            raise _shutting_down()
        return done.result()

    def residents(self) -> tuple[list[ResidentAdapter], int]:
        """The adapters in the rows, most recently used first, and the number of free rows."""
        return self.call(self._residency.residents)

    def close(self) -> None:
        """End the thread. Jobs that are not finished fail with ShuttingDown."""
        self._post(lambda: setattr(self, "_closing", True))
        self._thread.join()
        self._residency.close()

    def _post(self, message: Callable[[], None]) -> bool:
        """Have `message` run on the device thread; False when that has ended."""
        with self._closed_lock:
            if not self._closed:
                self._inbox.put(message)
            return not self._closed

    def _intercept(self, denoise: Mapping[str, Callable[..., Any]]) -> None:
        for name, component in self._base.components.items():
            for method_name in ("encode", "decode") if name == "vae" else ("forward",):
                function = denoise.get(name, getattr(component, method_name))
                method = Method(name, function, self._base.batching.get(name))
                intercept(component, method_name, method, self._hand_off)

    # On the jobs' threads.

    def _hand_off(self, method: Method, arguments: dict[str, Any]) -> Any:
        run = current_run.get()
        if error := run.job.over():
            raise error
        call = ModelCall(run, method, arguments)
        if method.batched:
            run.first_step_at = run.first_step_at or time.monotonic()
            _ = call.key  # computed here, not on the device thread
        self._inbox.put(lambda: self._arrive(call))
        return call.result.result()

    def _work(self, run: Run) -> None:
        current_run.set(run)
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
            now = time.monotonic()
            if step > 1:
                self._step_times.observe(run.kind, now - run.last_step_at)
            run.last_step_at, run.steps_done = now, step
            run.job.emit(StepDone(step))

        def on_preview(step: int, images: Sequence[Image]) -> None:
            for index, image in enumerate(images):
                run.job.emit(PreviewDone(step, index, encode_preview(image)))

        for position, image in enumerate(self._base.generate(parameters, on_step, on_preview)):
            index, frame = divmod(position, parameters.num_frames)
            seed = parameters.seed + index
            run.job.emit(ImageDone(index, encode(image, parameters, run.ready, seed, frame), seed, frame))
            metrics.IMAGES.inc()

    # On the device thread.

    @torch.no_grad()
    def _loop(self) -> None:
        while self._running or not self._closing:
            try:
                self._take_messages()
                if self._closing:
                    self._fail_all(_shutting_down())
                self._start_waiting()
                self._run_next()
            except Exception:  # noqa: BLE001 - the engine's loop: it must outlive whatever happens in one turn
                _log.exception("engine turn failed")
                self._fail_all(InternalError("The executor failed.", remedy="Its log has the details."))
        with self._closed_lock:
            self._closed = True
        self._take_messages(wait=False)
        self._fail_all(_shutting_down())

    def _take_messages(self, wait: bool = True) -> None:
        timeout = self._calls.idle_seconds() if wait else 0.0
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
        for run in [run for run in self._waiting if self._is_over(run)]:
            self._waiting.remove(run)
            run.job.emit(Failed(self._is_over(run) or InternalError("not over")))
        # As many are staged as run, so that adapters are loaded before their jobs' turn.
        while len(self._staged) < self._max_running_jobs:
            chosen = self._waiting.next(lambda run: self._residency.fits(run.fetched))
            if chosen is None:
                break  # a job that runs or is staged will unpin some rows: nothing waits while nothing runs
            self._stage(chosen)
        for run in [run for run in self._staged if run.is_loaded()]:
            if len(self._running) < self._max_running_jobs:
                self._staged.remove(run)
                self._begin(run)
        self._observe()

    def _stage(self, run: Run) -> None:
        try:
            run.held = self._residency.hold(run.job.parameters.adapters, run.fetched)
        except Exception:  # noqa: BLE001 - rows of a wrong shape end this job and leave every other adapter as it was
            self._fail_load(run)
            return
        self._staged.append(run)
        for load in filter(None, (one.load for one in run.held)):
            load.add_done_callback(lambda _: self._inbox.put(lambda: None))  # wakes the loop up

    def _begin(self, run: Run) -> None:
        error = self._is_over(run)
        try:
            run.ready = tuple(one.ready() for one in run.held)
        except Exception:  # noqa: BLE001 - a load that fails ends its jobs and leaves every other adapter as it was
            self._residency.release(run.held)
            self._fail_load(run)
            return
        if error:
            self._residency.release(run.held)
            run.job.emit(Failed(error))
            return
        run.started_at = time.monotonic()
        run.graphs_before = compiled_graphs()
        self._running.add(run)
        for ready in run.ready:
            run.job.emit(ready)
        threading.Thread(target=self._work, args=(run,), name=f"job-{run.job.request_id}", daemon=True).start()

    def _fail_load(self, run: Run) -> None:
        _log.exception("load failed", request_id=run.job.request_id)
        run.job.emit(Failed(InternalError("An adapter could not be loaded.", remedy="Try again.")))

    def _is_over(self, run: Run) -> ServiceError | None:
        """Why a run must not go on: it is cancelled or too late, or cannot be in time any more."""
        if error := run.job.over():
            return error
        needed_s = self._step_times.at_least(run.kind, run.steps_left)
        if run.job.deadline is None or time.monotonic() + needed_s <= run.job.deadline:
            return None
        return DeadlineExceeded(
            f"The deadline cannot be met: {run.steps_left} more steps take at least {needed_s:.1f} s.",
            remedy="Allow more time, or ask for fewer steps.",
        )

    def _end(self, run: Run, outcome: Event) -> None:
        self._running.discard(run)
        self._residency.release(run.held)
        if isinstance(outcome, Finished):
            metrics.RECOMPILATIONS.inc(outcome.recompilations)
        self._observe()
        run.job.emit(outcome)

    def _run_next(self) -> None:
        self._calls.drop(self._is_over)
        if solo := self._calls.take_solo():
            self._run_solo(solo)
        elif shares := self._calls.take_batch():
            self._run_shared(shares)
            self._calls.settle()

    def _run_solo(self, call: ModelCall) -> None:
        try:
            if call.method.component in self._base.adaptable:  # the autoencoder reads no rows
                self._table.select([call.run.active(call.method.component)] * len(self._table.row_index))
            call.result.set_result(call.method.function(**call.arguments))
        except Exception as error:  # noqa: BLE001 - raised again on the job's thread
            call.result.set_exception(error)

    def _run_shared(self, shares: Shares) -> None:
        samples = [call.run.active(call.method.component) for call, count in shares for _ in range(count)]
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
            self._waiting.remove(run)
            run.job.emit(Failed(error))
        for run in self._staged:
            self._residency.release(run.held)
            run.job.emit(Failed(error))
        self._staged.clear()

    def _observe(self) -> None:
        metrics.RUNNING_JOBS.set(len(self._running))
        self._residency.observe()


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The executor is shutting down.", remedy="Ask another replica.")
