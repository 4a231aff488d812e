"""Proto <-> domain, and the one message that is too large to be built as proto."""

import dataclasses
from typing import TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from adapter_store.inspection import Inspection
from adapter_store.listing import Listed
from adapter_store.store import Prepared, Progress, Stage
from loraplex.pack_options import PackOptions
from loraplex.v1 import adapter_store_pb2 as pb
from loraplex.v1 import layout_pb2

# What FetchAdapter yields: messages, and bare pieces of the packed file.
FetchPart: TypeAlias = "pb.FetchAdapterResponse | memoryview"

_SOURCES = {
    "cache": pb.ADAPTER_SOURCE_CACHE,
    "local": pb.ADAPTER_SOURCE_LOCAL,
    "hub": pb.ADAPTER_SOURCE_HUB,
    "https": pb.ADAPTER_SOURCE_URL,
    "fsspec": pb.ADAPTER_SOURCE_URL,
}
_STAGES = {
    Stage.RESOLVING: pb.PREFETCH_STAGE_RESOLVING,
    Stage.DOWNLOADING: pb.PREFETCH_STAGE_DOWNLOADING,
    Stage.PACKING: pb.PREFETCH_STAGE_PACKING,
}
# The tag of FetchAdapterResponse.chunk: field number, wire type 2 (length-delimited).
_CHUNK_TAG = bytes((pb.FetchAdapterResponse.CHUNK_FIELD_NUMBER << 3 | 2,))


def options(message: layout_pb2.PackOptions) -> PackOptions:
    """The options of a request; unset, those that fit a file exactly. Raises InvalidRequest."""
    return PackOptions.from_proto(message).checked()


def serialize_fetch(part: FetchPart) -> bytes:
    """A FetchAdapterResponse on the wire. A bare chunk is copied once: tag, length and payload are all it takes."""
    if isinstance(part, memoryview):
        return b"".join((_CHUNK_TAG, _varint(part.nbytes), part))
    return part.SerializeToString()


def header(prepared: Prepared, seconds: float, unchanged: bool = False) -> pb.AdapterHeader:
    """What is sent before the bytes."""
    entry = prepared.entry
    return pb.AdapterHeader(
        digest=entry.digest,
        size_bytes=entry.size_bytes,
        rank=entry.rank,
        module_indexes=entry.module_indexes,
        commit=prepared.commit,
        source=_SOURCES[prepared.came_from],
        prepare_duration=Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9)),
        unchanged=unchanged,
        waived_tensors=entry.waived_tensors,
        error=entry.error,
    )


def progress(report: Progress) -> pb.PrefetchResponse:
    """One report of a preparation."""
    return pb.PrefetchResponse(
        stage=_STAGES[report.stage], downloaded_bytes=report.downloaded_bytes, total_bytes=report.total_bytes
    )


def inspection(report: Inspection) -> pb.InspectAdapterResponse:
    """What a file contains."""
    response = pb.InspectAdapterResponse(
        commit=report.commit,
        weight_name=report.weight_name,
        size_bytes=report.size_bytes,
        source_digest=report.source_digest,
        dialects=report.dialects,
        tensors=report.tensors,
        modules=[pb.InspectedModule(**dataclasses.asdict(module)) for module in report.modules],
        applicable=report.applicable,
        rank=report.rank,
        family=report.family,
        applied_tensors=len(report.accounting.applied),
        zero_tensors=len(report.accounting.zero),
        waived_keys=report.accounting.waived,
    )
    if report.rejection is not None:
        error = report.rejection
        response.rejection.CopyFrom(
            pb.Rejection(cause=error.cause, key=error.key, message=error.message, remedy=error.remedy)
        )
    return response


def listed(adapter: Listed) -> pb.ListedAdapter:
    """One adapter of a listing."""
    cached = [
        pb.CachedAdapter(
            digest=entry.digest,
            layout_digest=entry.layout_digest,
            size_bytes=entry.size_bytes,
            rank=entry.rank,
            last_used_time=Timestamp(seconds=int(entry.last_used_s), nanos=int(entry.last_used_s % 1 * 1e9)),
        )
        for entry in adapter.cached
    ]
    return pb.ListedAdapter(ref=adapter.ref, weight_name=adapter.weight_name, local=adapter.local, cached=cached)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
