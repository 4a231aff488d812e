"""The executor's rpcs: proto to job, events to proto."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from executor import metrics
from executor.adapters import Fetched, HostAdapters
from executor.config import ExecutorSettings
from executor.engine import Engine
from executor.jobs import AdapterReady, Event, Failed, Finished, ImageDone, Job, Parameters, StepDone
from executor.pipeline import BasePipeline, compiled_graphs
from executor.requests import check_request
from executor.scheduler import Admission
from loraplex.errors import TooManyRows
from loraplex.layout import Layout
from loraplex.serving import request_id
from loraplex.v1 import executor_pb2 as pb
from loraplex.v1 import executor_pb2_grpc

_READY_FROM = {
    "rows": pb.READY_FROM_ROWS,
    "host_memory": pb.READY_FROM_HOST_MEMORY,
    "store": pb.READY_FROM_STORE,
}
_FORMATS = {
    "PNG": pb.OUTPUT_FORMAT_PNG,
    "JPEG": pb.OUTPUT_FORMAT_JPEG,
    "WEBP": pb.OUTPUT_FORMAT_WEBP,
}

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Parts:
    """What the rpcs work with once the model is warm."""

    base: BasePipeline
    layout: Layout
    engine: Engine
    adapters: HostAdapters
    device: str


class ExecutorServicer(executor_pb2_grpc.ExecutorServicer):
    """Answers the rpcs of loraplex.v1.Executor. Event loop only; the serving gate is shut until `parts` is set."""

    parts: Parts

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._admission = Admission(settings.max_queue_length)
        self._jobs: set[Job] = set()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Admit, fetch, run; whatever happens, the job has ended when this has."""
        parameters = check_request(request, self._settings)
        self.parts.base.check(parameters)
        time_left = context.time_remaining()
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        job = Job(
            request_id=request_id(),
            parameters=parameters,
            deadline=None if time_left is None else time.monotonic() + time_left,
            listener=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),
        )
        ahead = self._admission.admit(job)
        self._jobs.add(job)
        metrics.QUEUE_LENGTH.set(len(self._admission))
        submitted = False
        try:
            yield pb.GenerateResponse(queued=pb.Queued(requests_ahead=ahead))
            fetched = await self._fetch(parameters)
            self.parts.engine.submit(job, fetched)
            submitted = True
            while not isinstance(event := await events.get(), Finished):
                if isinstance(event, Failed):
                    submitted = False
                    raise event.error
                yield _to_proto(event, job)
            submitted = False
            yield _summary(event, job, self.parts.layout)
        finally:
            job.cancel()
            while submitted and not isinstance(await events.get(), Finished | Failed):
                pass
            self._jobs.discard(job)
            self._admission.leave(job, time.monotonic() - job.admitted_at)
            metrics.QUEUE_LENGTH.set(len(self._admission))

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """End the unfinished requests of an id."""
        found = [job for job in self._jobs if job.request_id == request.request_id]
        for job in found:
            job.cancel()
        return pb.CancelResponse(found=bool(found))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """The base model and the limits of a request."""
        settings, layout = self._settings, self.parts.layout
        return pb.GetModelResponse(
            layout=layout.to_proto(),
            layout_digest=layout.digest,
            device=self.parts.device,
            arena_rows=settings.arena_rows,
            rows_per_sample=settings.rows_per_sample,
            batch_sizes=settings.batch_sizes,
            resolutions=[pb.Resolution(width=width, height=height) for width, height in settings.resolutions],
            default_num_inference_steps=settings.default_num_inference_steps,
            default_guidance_scale=settings.default_guidance_scale,
            max_num_inference_steps=settings.max_num_inference_steps,
            max_num_images=settings.max_num_images,
            compiled_graphs=compiled_graphs(),
            max_queue_length=settings.max_queue_length,
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
                    last_used_time=_timestamp(resident.last_used),
                )
                for resident in residents
            ],
            free_rows=free_rows,
        )

    async def _fetch(self, parameters: Parameters) -> tuple[Fetched, ...]:
        fetches = [asyncio.ensure_future(self.parts.adapters.get(choice.ref)) for choice in parameters.adapters]
        try:
            fetched = await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()
        for one in fetched:
            metrics.FETCH_SECONDS.labels(one.source).observe(one.seconds)
        ranks = [one.adapter.header.rank for one in fetched]
        if sum(ranks) > self._settings.rows_per_sample:
            raise TooManyRows(
                f"The adapters' ranks are {' + '.join(map(str, ranks))} = {sum(ranks)}; "
                f"one image can use {self._settings.rows_per_sample} rank rows.",
                field="adapters",
                remedy="Use fewer adapters or smaller ranks, or an executor with more rows_per_sample.",
            )
        return tuple(fetched)


def _to_proto(event: Event, job: Job) -> pb.GenerateResponse:
    parameters = job.parameters
    if isinstance(event, AdapterReady):
        return pb.GenerateResponse(
            adapter_ready=pb.AdapterReady(
                ref=event.ref,
                digest=event.digest,
                commit=event.commit,
                rank=event.rank,
                modules=event.modules,
                ready_from=_READY_FROM[event.ready_from],
                fetch_duration=_duration(event.fetch_seconds),
                load_duration=_duration(event.load_seconds),
            )
        )
    if isinstance(event, StepDone):
        return pb.GenerateResponse(
            step_done=pb.StepDone(step=event.step, num_inference_steps=parameters.num_inference_steps)
        )
    assert isinstance(event, ImageDone)
    return pb.GenerateResponse(
        image=pb.Image(
            index=event.index,
            data=event.data,
            output_format=_FORMATS[parameters.image_format],
            width=parameters.width,
            height=parameters.height,
            seed=event.seed,
        )
    )


def _summary(finished: Finished, job: Job, layout: Layout) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        summary=pb.Summary(
            request_id=job.request_id,
            adapters=[
                pb.AppliedAdapter(
                    ref=adapter.ref,
                    digest=adapter.digest,
                    commit=adapter.commit,
                    strength=adapter.strength,
                    rank=adapter.rank,
                    modules=adapter.modules,
                )
                for adapter in finished.adapters
            ],
            recompilations=finished.recompilations,
            steps=job.parameters.num_inference_steps,
            queue_duration=_duration(finished.queue_seconds),
            denoise_duration=_duration(finished.denoise_seconds),
            total_duration=_duration(finished.total_seconds),
            base_model=layout.base_model,
        )
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _timestamp(seconds: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(round(seconds * 1e9))
    return timestamp
