"""What the services tell about themselves: the model, its residents, and the adapters of the store."""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from google.protobuf.timestamp_pb2 import Timestamp

from loraplex.layout import Layout
from loraplex.v1 import adapter_store_pb2, executor_pb2

Mode = Literal["text_to_image", "image_to_image", "inpaint", "text_to_video"]

_MODES: dict[int, Mode] = {
    executor_pb2.MODE_TEXT_TO_IMAGE: "text_to_image",
    executor_pb2.MODE_IMAGE_TO_IMAGE: "image_to_image",
    executor_pb2.MODE_INPAINT: "inpaint",
    executor_pb2.MODE_TEXT_TO_VIDEO: "text_to_video",
}


@dataclass(frozen=True)
class Model:
    """The base model that an executor serves and the limits of a request."""

    layout: Layout
    layout_digest: str
    device: str
    arena_rows: int
    rows_per_sample: int
    batch_sizes: tuple[int, ...]
    resolutions: tuple[tuple[int, int], ...]
    """(width, height) in pixels; others are refused."""
    default_num_inference_steps: int
    default_guidance_scale: float
    max_num_inference_steps: int
    max_num_images: int
    compiled_graphs: int
    max_queue_length: int
    modes: tuple[Mode, ...] = ()
    max_num_frames: int = 0
    """0 when the base makes no videos."""

    @property
    def base_model(self) -> str:
        """The name of the base model."""
        return self.layout.base_model

    @classmethod
    def from_proto(cls, wire: executor_pb2.GetModelResponse) -> "Model":
        """The model of a message."""
        return cls(
            layout=Layout.from_proto(wire.layout),
            layout_digest=wire.layout_digest,
            device=wire.device,
            arena_rows=wire.arena_rows,
            rows_per_sample=wire.rows_per_sample,
            batch_sizes=tuple(wire.batch_sizes),
            resolutions=tuple((size.width, size.height) for size in wire.resolutions),
            default_num_inference_steps=wire.default_num_inference_steps,
            default_guidance_scale=wire.default_guidance_scale,
            max_num_inference_steps=wire.max_num_inference_steps,
            max_num_images=wire.max_num_images,
            compiled_graphs=wire.compiled_graphs,
            max_queue_length=wire.max_queue_length,
            modes=tuple(_MODES[mode] for mode in wire.modes if mode in _MODES),
            max_num_frames=wire.max_num_frames,
        )


@dataclass(frozen=True)
class Resident:
    """One adapter in the rank rows; `pins` running requests select it."""

    digest: str
    rank: int
    modules: int
    pins: int
    last_used: datetime | None


@dataclass(frozen=True)
class Residents:
    """The adapters in the rank rows, most recently used first, and the rows that none of them owns."""

    adapters: tuple[Resident, ...]
    free_rows: int

    @classmethod
    def from_proto(cls, wire: executor_pb2.ListResidentsResponse) -> "Residents":
        """The residents of a message."""
        adapters = tuple(
            Resident(r.digest, r.rank, r.modules, r.pins, _when(r, "last_used_time")) for r in wire.residents
        )
        return cls(adapters=adapters, free_rows=wire.free_rows)


@dataclass(frozen=True)
class CachedAdapter:
    """One packed adapter in the store's cache."""

    digest: str
    layout_digest: str
    size_bytes: int
    rank: int
    last_used: datetime | None


@dataclass(frozen=True)
class ListedAdapter:
    """One adapter that the store can serve without a download; `ref` is what to ask for it with."""

    ref: str
    weight_name: str
    local: bool
    cached: tuple[CachedAdapter, ...]

    @classmethod
    def from_proto(cls, wire: adapter_store_pb2.ListedAdapter) -> "ListedAdapter":
        """The adapter of a message."""
        cached = tuple(
            CachedAdapter(c.digest, c.layout_digest, c.size_bytes, c.rank, _when(c, "last_used_time"))
            for c in wire.cached
        )
        return cls(ref=wire.ref, weight_name=wire.weight_name, local=wire.local, cached=cached)


@dataclass(frozen=True)
class InspectedModule:
    """One module that a file adapts; alpha is None when the file has none, which means scaling 1."""

    component: str
    name: str
    rank: int
    alpha: float | None


@dataclass(frozen=True)
class Rejection:
    """Why a file is refused: cause (UPPER_SNAKE), its first bad key, a message and a remedy."""

    cause: str
    key: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Inspection:
    """What a file contains, and whether it can be applied to a layout; `applicable` is None when none was named."""

    commit: str
    weight_name: str
    size_bytes: int
    source_digest: str
    dialects: tuple[str, ...]
    tensors: int
    modules: tuple[InspectedModule, ...]
    rank: int
    applicable: bool | None
    rejection: Rejection | None

    @classmethod
    def from_proto(cls, wire: adapter_store_pb2.InspectAdapterResponse, *, with_layout: bool) -> "Inspection":
        """The inspection of a message; `with_layout` says whether the request named a layout."""
        why = wire.rejection
        rejected = wire.HasField("rejection")
        return cls(
            commit=wire.commit,
            weight_name=wire.weight_name,
            size_bytes=wire.size_bytes,
            source_digest=wire.source_digest,
            dialects=tuple(wire.dialects),
            tensors=wire.tensors,
            modules=tuple(
                InspectedModule(m.component, m.name, m.rank, m.alpha if m.HasField("alpha") else None)
                for m in wire.modules
            ),
            rank=wire.rank,
            applicable=wire.applicable if with_layout else None,
            rejection=Rejection(why.cause, why.key, why.message, why.remedy) if rejected else None,
        )


Stage = Literal["unknown", "resolving", "downloading", "packing", "ready"]

_STAGES: dict[int, Stage] = {
    adapter_store_pb2.PREFETCH_STAGE_RESOLVING: "resolving",
    adapter_store_pb2.PREFETCH_STAGE_DOWNLOADING: "downloading",
    adapter_store_pb2.PREFETCH_STAGE_PACKING: "packing",
    adapter_store_pb2.PREFETCH_STAGE_READY: "ready",
}


@dataclass(frozen=True)
class PrefetchProgress:
    """One report on an adapter's way into the store's cache; digest, rank and packed size come with stage "ready"."""

    stage: Stage
    downloaded_bytes: int
    total_bytes: int
    digest: str
    rank: int
    packed_bytes: int

    @classmethod
    def from_proto(cls, wire: adapter_store_pb2.PrefetchResponse) -> "PrefetchProgress":
        """The report of a message."""
        return cls(
            stage=_STAGES.get(wire.stage, "unknown"),
            downloaded_bytes=wire.downloaded_bytes,
            total_bytes=wire.total_bytes,
            digest=wire.header.digest,
            rank=wire.header.rank,
            packed_bytes=wire.header.size_bytes,
        )


def _when(
    wire: executor_pb2.Resident | adapter_store_pb2.CachedAdapter, field: Literal["last_used_time"]
) -> datetime | None:
    stamp: Timestamp = getattr(wire, field)
    return stamp.ToDatetime(tzinfo=timezone.utc) if wire.HasField(field) else None
