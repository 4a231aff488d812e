"""The events of a generation, in their order: queued, adapter ready, step done and preview, image, summary."""

import io
from dataclasses import dataclass
from typing import Literal

import PIL.Image

from loraplex.v1 import executor_pb2

OutputFormat = Literal["png", "jpeg", "webp"]
ReadyFrom = Literal["unknown", "rows", "host_memory", "store"]

FORMAT_TO_WIRE: dict[OutputFormat, "executor_pb2.OutputFormat.ValueType"] = {
    "png": executor_pb2.OUTPUT_FORMAT_PNG,
    "jpeg": executor_pb2.OUTPUT_FORMAT_JPEG,
    "webp": executor_pb2.OUTPUT_FORMAT_WEBP,
}
_FORMAT_FROM_WIRE = {wire: name for name, wire in FORMAT_TO_WIRE.items()}
_READY_FROM_WIRE: dict[int, ReadyFrom] = {
    executor_pb2.READY_FROM_ROWS: "rows",
    executor_pb2.READY_FROM_HOST_MEMORY: "host_memory",
    executor_pb2.READY_FROM_STORE: "store",
}


@dataclass(frozen=True)
class Queued:
    """The request was admitted; `requests_ahead` admitted ones have not finished."""

    requests_ahead: int


@dataclass(frozen=True)
class AdapterReady:
    """One adapter is in the rank rows. `fetch_s` until it was in host memory, `load_s` to copy it into the rows."""

    ref: str
    digest: str
    commit: str
    rank: int
    modules: int
    ready_from: ReadyFrom
    fetch_s: float
    load_s: float


@dataclass(frozen=True)
class StepDone:
    """Denoising step `step` of `num_inference_steps` is done, counted from 1."""

    step: int
    num_inference_steps: int


@dataclass(frozen=True)
class Preview:
    """Image `index` as it is after `step` steps, roughly: `data` is a small JPEG."""

    step: int
    index: int
    data: bytes

    def to_pil(self) -> PIL.Image.Image:
        """The decoded preview."""
        return _decoded(self.data)


@dataclass(frozen=True)
class Image:
    """One image, or frame `frame` of video `index`, encoded; `seed` gives this one again, up to rounding."""

    index: int
    data: bytes
    output_format: OutputFormat
    width: int
    height: int
    seed: int
    frame: int = 0

    def to_pil(self) -> PIL.Image.Image:
        """The decoded image; a PNG's `text` holds the parameters of the request, as EXIF's UserComment of others."""
        return _decoded(self.data)


@dataclass(frozen=True)
class AppliedAdapter:
    """One adapter as it was applied."""

    ref: str
    digest: str
    commit: str
    strength: float
    rank: int
    modules: int


@dataclass(frozen=True)
class Summary:
    """The last event: what was done. `recompilations` is 0 unless something is wrong with the executor."""

    request_id: str
    adapters: tuple[AppliedAdapter, ...]
    recompilations: int
    steps: int
    queue_s: float
    denoise_s: float
    total_s: float
    base_model: str


Event = Queued | AdapterReady | StepDone | Preview | Image | Summary


def event_from_proto(response: executor_pb2.GenerateResponse) -> Event | None:
    """The event of one message of the stream; None for a kind that this client does not know yet."""
    match response.WhichOneof("event"):
        case "queued":
            return Queued(response.queued.requests_ahead)
        case "adapter_ready":
            return _adapter_ready(response.adapter_ready)
        case "step_done":
            return StepDone(response.step_done.step, response.step_done.num_inference_steps)
        case "preview":
            return Preview(response.preview.step, response.preview.index, response.preview.data)
        case "image":
            return _image(response.image)
        case "summary":
            return _summary(response.summary)
    return None


def _adapter_ready(wire: executor_pb2.AdapterReady) -> AdapterReady:
    return AdapterReady(
        ref=wire.ref,
        digest=wire.digest,
        commit=wire.commit,
        rank=wire.rank,
        modules=wire.modules,
        ready_from=_READY_FROM_WIRE.get(wire.ready_from, "unknown"),
        fetch_s=wire.fetch_duration.ToNanoseconds() / 1e9,
        load_s=wire.load_duration.ToNanoseconds() / 1e9,
    )


def _image(wire: executor_pb2.Image) -> Image:
    return Image(
        index=wire.index,
        data=wire.data,
        output_format=_FORMAT_FROM_WIRE[wire.output_format],
        width=wire.width,
        height=wire.height,
        seed=wire.seed,
        frame=wire.frame,
    )


def _decoded(data: bytes) -> PIL.Image.Image:
    image = PIL.Image.open(io.BytesIO(data))
    image.load()
    return image


def _summary(wire: executor_pb2.Summary) -> Summary:
    return Summary(
        request_id=wire.request_id,
        adapters=tuple(
            AppliedAdapter(
                ref=a.ref, digest=a.digest, commit=a.commit, strength=a.strength, rank=a.rank, modules=a.modules
            )
            for a in wire.adapters
        ),
        recompilations=wire.recompilations,
        steps=wire.steps,
        queue_s=wire.queue_duration.ToNanoseconds() / 1e9,
        denoise_s=wire.denoise_duration.ToNanoseconds() / 1e9,
        total_s=wire.total_duration.ToNanoseconds() / 1e9,
        base_model=wire.base_model,
    )
