"""The executor's rpcs: proto to job, events to proto."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import grpc.aio

from executor import metrics
from executor.adapter_choices import check_rows, check_touched
from executor.adapters import Fetched, HostAdapters
from executor.compilation import compiled_graphs
from executor.config import ExecutorSettings
from executor.engine import Engine
from executor.event_queue import EventQueue
from executor.input_images import decode
from executor.jobs import AdapterChoice, Failed, Finished, Job, Parameters
from executor.messages import MODES, response, summary, timestamp
from executor.pipeline import BasePipeline
from executor.requests import Served, check_cancelled_id, check_priority, check_request
from executor.scheduler import Admission
from loraplex.layout import Layout
from loraplex.serving import request_id
from loraplex.v1 import executor_pb2 as pb
from loraplex.v1 import executor_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """What the rpcs work with once the model is warm."""

    base: BasePipeline
    layout: Layout
    arena_rows: int  # the zero row included
    engine: Engine
    adapters: HostAdapters
    device: str

    @cached_property
    def served(self) -> Served:
        """What the base model can be asked for."""
        return Served(
            modes=self.base.modes,
            components=frozenset(module.component for module in self.layout.modules),
            image_strengths=self.base.image_strengths,
            skipped_steps=self.base.skipped_steps,
            previews=self.base.has_previews,
            frames_multiple=self.base.frames_multiple,
        )


class ExecutorServicer(executor_pb2_grpc.ExecutorServicer):
    """Answers the rpcs of loraplex.v1.Executor. Event loop only; the serving gate is shut until `parts` is set."""

    parts: Parts

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._admission = Admission(settings.max_queue_length)
        self._cancelled: dict[Job, asyncio.Event] = {}  # of all unfinished jobs
        self._decoding = asyncio.Semaphore(1)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Admit, decode, fetch, run; whatever happens, the job has ended when this has."""
        time_left = context.time_remaining()
        parameters = check_request(request, self._settings, self.parts.served)
        self.parts.base.check(parameters)
        loop, events = asyncio.get_running_loop(), EventQueue()
        job = Job(
            request_id=request_id(),
            parameters=parameters,
            deadline=None if time_left is None else time.monotonic() + time_left,
            listener=lambda event: loop.call_soon_threadsafe(events.put, event),
            priority=check_priority(request),
        )
        ahead = self._admit(job)
        submitted = False
        try:
            job.parameters = await self._unless_over(job, self._with_images(parameters, request))
            yield pb.GenerateResponse(queued=pb.Queued(requests_ahead=ahead))
            fetched = await self._unless_over(job, self._fetch(parameters.adapters))
            self.parts.engine.submit(job, fetched)
            submitted = True
            while not isinstance(event := await events.get(), Finished):
                if isinstance(event, Failed):
                    submitted = False
                    raise event.error
                yield response(event, job.parameters)
            submitted = False
            yield summary(event, job, self._modules(parameters.adapters, fetched), self.parts.layout.base_model)
        finally:
            job.cancel()
            while submitted and not isinstance(await events.get(), Finished | Failed):
                pass
            self._leave(job)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """End the unfinished requests of an id."""
        cancelled_id = check_cancelled_id(request)
        found = [job for job in self._cancelled if job.request_id == cancelled_id]
        for job in found:
            job.cancel()
            self._cancelled[job].set()
        return pb.CancelResponse(found=bool(found))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """The base model and the limits of a request."""
        settings, layout, modes = self._settings, self.parts.layout, self.parts.base.modes
        return pb.GetModelResponse(
            layout=layout.to_proto(),
            layout_digest=layout.digest,
            device=self.parts.device,
            arena_rows=self.parts.arena_rows,
            rows_per_sample=settings.rows_per_sample,
            batch_sizes=settings.batch_sizes,
            resolutions=[pb.Resolution(width=width, height=height) for width, height in settings.resolutions],
            default_num_inference_steps=settings.default_num_inference_steps,
            default_guidance_scale=settings.default_guidance_scale,
            max_num_inference_steps=settings.max_num_inference_steps,
            max_num_images=settings.max_num_images,
            compiled_graphs=compiled_graphs(),
            max_queue_length=settings.max_queue_length,
            modes=sorted(MODES[mode] for mode in modes),
            max_num_frames=settings.max_num_frames if "text_to_video" in modes else 0,
        )

    async def ListResidents(self, request: pb.ListResidentsRequest, context: Context) -> pb.ListResidentsResponse:
        """The adapters in the rank rows."""
        residents, free_rows = await asyncio.to_thread(self.parts.engine.residents)
        return pb.ListResidentsResponse(
            residents=[
                pb.Resident(
                    digest=resident.digest,
                    rank=resident.rank,
                    modules=resident.modules,
                    pins=resident.pins,
                    last_used_time=timestamp(resident.last_used),
                )
                for resident in residents
            ],
            free_rows=free_rows,
        )

    def _admit(self, job: Job) -> int:
        ahead = self._admission.admit(job)
        self._cancelled[job] = asyncio.Event()
        metrics.QUEUE_LENGTH.set(len(self._admission))
        return ahead

    def _leave(self, job: Job) -> None:
        del self._cancelled[job]
        self._admission.leave(job, time.monotonic() - job.admitted_at)
        metrics.QUEUE_LENGTH.set(len(self._admission))

    async def _unless_over(self, job: Job, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled as soon as the job is; raises why."""
        working = asyncio.ensure_future(work)
        cancelled = asyncio.ensure_future(self._cancelled[job].wait())
        try:
            while not working.done():
                if error := job.over():
                    raise error
                left = None if job.deadline is None else max(0.0, job.deadline - time.monotonic())
                await asyncio.wait({working, cancelled}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            return working.result()
        finally:
            working.cancel()
            cancelled.cancel()

    async def _with_images(self, parameters: Parameters, request: pb.GenerateRequest) -> Parameters:
        initial, mask = request.initial_image, request.mask_image
        if not initial:
            return parameters
        request.Clear()  # the files may be large, and the call may be long
        size = parameters.width, parameters.height
        async with self._decoding:  # one at a time: what decoding costs in memory is bounded
            decoded = await asyncio.to_thread(decode, initial, mask, size, self._settings.max_image_pixels)
        return replace(
            parameters,
            initial_image=decoded.initial,
            mask_image=decoded.mask,
            initial_image_sha256=decoded.initial_sha256,
            mask_image_sha256=decoded.mask_sha256,
        )

    async def _fetch(self, choices: Sequence[AdapterChoice]) -> tuple[Fetched, ...]:
        fetches = [asyncio.ensure_future(self.parts.adapters.get(choice.ref, choice.options)) for choice in choices]
        try:
            fetched = await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()
        for one in fetched:
            metrics.FETCH_SECONDS.labels(one.source).observe(one.seconds)
        headers = [one.adapter.header for one in fetched]
        modules = self.parts.layout.modules
        check_touched(choices, [{modules[index].component for index in header.module_indexes} for header in headers])
        check_rows(
            choices,
            ranks={header.digest: header.rank for header in headers},
            digests=[header.digest for header in headers],
            rows_per_sample=self._settings.rows_per_sample,
            rows=self.parts.arena_rows - 1,
        )
        return tuple(fetched)

    def _modules(self, choices: Sequence[AdapterChoice], fetched: Sequence[Fetched]) -> list[int]:
        """How many modules each adapter is applied to."""
        modules = self.parts.layout.modules
        return [
            sum(
                not choice.components or modules[index].component in choice.components
                for index in one.adapter.header.module_indexes
            )
            for choice, one in zip(choices, fetched, strict=True)
        ]
