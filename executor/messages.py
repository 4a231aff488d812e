"""From events and parts of the executor to the messages of the wire."""

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from executor.jobs import AdapterReady, Finished, ImageDone, Job, Mode, Parameters, PreviewDone, StepDone
from loraplex.v1 import executor_pb2 as pb

MODES: dict[Mode, "pb.Mode.ValueType"] = {
    "text_to_image": pb.MODE_TEXT_TO_IMAGE,
    "image_to_image": pb.MODE_IMAGE_TO_IMAGE,
    "inpaint": pb.MODE_INPAINT,
    "text_to_video": pb.MODE_TEXT_TO_VIDEO,
}
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


def response(event: AdapterReady | StepDone | PreviewDone | ImageDone, parameters: Parameters) -> pb.GenerateResponse:
    """The message of an event of a job with these parameters."""
    if isinstance(event, AdapterReady):
        return pb.GenerateResponse(adapter_ready=_adapter_ready(event))
    if isinstance(event, StepDone):
        done = pb.StepDone(step=event.step, num_inference_steps=parameters.num_steps)
        return pb.GenerateResponse(step_done=done)
    if isinstance(event, PreviewDone):
        return pb.GenerateResponse(preview=pb.Preview(step=event.step, index=event.index, data=event.data))
    return pb.GenerateResponse(
        image=pb.Image(
            index=event.index,
            data=event.data,
            output_format=_FORMATS[parameters.image_format],
            width=parameters.width,
            height=parameters.height,
            seed=event.seed,
            frame=event.frame,
        )
    )


def summary(finished: Finished, job: Job, modules: Sequence[int], base_model: str) -> pb.GenerateResponse:
    """The last message of a job; `modules` is how many each of its adapters was applied to."""
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
                    modules=number,
                )
                for adapter, number in zip(finished.adapters, modules, strict=True)
            ],
            recompilations=finished.recompilations,
            steps=job.parameters.num_steps,
            queue_duration=_duration(finished.queue_seconds),
            denoise_duration=_duration(finished.denoise_seconds),
            total_duration=_duration(finished.total_seconds),
            base_model=base_model,
        )
    )


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch."""
    stamp = Timestamp()
    stamp.FromNanoseconds(round(seconds * 1e9))
    return stamp


def _adapter_ready(event: AdapterReady) -> pb.AdapterReady:
    return pb.AdapterReady(
        ref=event.ref,
        digest=event.digest,
        commit=event.commit,
        rank=event.rank,
        modules=event.modules,
        ready_from=_READY_FROM[event.ready_from],
        fetch_duration=_duration(event.fetch_seconds),
        load_duration=_duration(event.load_seconds),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
