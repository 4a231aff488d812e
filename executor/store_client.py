"""The executor's side of the adapter store: register the layout, fetch a packed adapter into host memory, verified."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import structlog
import torch

from executor.arena import TORCH_DTYPES
from loraplex.channel import CLIENT_OPTIONS
from loraplex.errors import (
    Cancelled,
    CorruptAdapter,
    DeadlineExceeded,
    InternalError,
    ServiceError,
    ServiceUnavailable,
    ShuttingDown,
    StoreUnavailable,
    UnknownLayout,
)
from loraplex.layout import DTYPE_SIZES, Layout
from loraplex.pack_options import EXACTLY, PackOptions
from loraplex.packed import PackedHeader
from loraplex.status import from_rpc_error
from loraplex.v1 import adapter_store_pb2, adapter_store_pb2_grpc

_log = structlog.stdlib.get_logger("loraplex.executor")

_FETCH = "/loraplex.v1.AdapterStore/FetchAdapter"
_CHUNK_TAG = 0x12  # field 2, length-delimited: FetchAdapterResponse.chunk
_MAX_FILE_HEADER_BYTES = 100_000_008  # what safetensors itself allows before the tensors
_RETRY_AFTER_S = 1.0  # the longest pause between two attempts to connect
_CORRUPT = "Try again; if it stays, let the store's operator run `python -m adapter_store verify-cache`."
_Messages = Iterator[adapter_store_pb2.FetchAdapterResponse | memoryview]
_Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PackedAdapter:
    """A packed adapter in host memory: `rows` [rank, packed width] of the layout's dtype."""

    header: PackedHeader
    rows: torch.Tensor


def parse_response(data: bytes) -> adapter_store_pb2.FetchAdapterResponse | memoryview:
    """A FetchAdapterResponse, or for a chunk just its bytes, without protobuf's copy."""
    if not data or data[0] != _CHUNK_TAG:
        return adapter_store_pb2.FetchAdapterResponse.FromString(data)
    length, shift, position = 0, 0, 1
    while True:
        if position == len(data):
            raise CorruptAdapter("A chunk of a packed adapter ends before its length.")
        byte = data[position]
        position += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if position + length != len(data):
        raise CorruptAdapter("A chunk of a packed adapter is not as long as it says.")
    return memoryview(data)[position:]


class StoreClient:
    """Calls one adapter store for one layout. Its methods block; any thread may call them."""

    def __init__(self, target: str, layout: Layout, *, fetch_timeout_s: float, pin_memory: bool) -> None:
        self._target = target
        self._layout = layout
        self._fetch_timeout_s = fetch_timeout_s
        self._pin_memory = pin_memory
        self._channel = grpc.insecure_channel(target, options=CLIENT_OPTIONS)
        self._stub = adapter_store_pb2_grpc.AdapterStoreStub(self._channel)
        self._fetch = self._channel.unary_stream(
            _FETCH,
            request_serializer=adapter_store_pb2.FetchAdapterRequest.SerializeToString,
            response_deserializer=parse_response,
        )

    def close(self) -> None:
        """Close the channel; calls under way end with an error."""
        self._channel.close()

    def register_layout(self, timeout_s: float) -> None:
        """Make the layout known to the store. Waits for the store up to `timeout_s`; StoreUnavailable after that."""
        request = adapter_store_pb2.RegisterLayoutRequest(layout=self._layout.to_proto())
        try:
            response = self._stub.RegisterLayout(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise self._translate(error) from error
        if response.layout_digest != self._layout.digest:
            raise StoreUnavailable(
                "The adapter store computed another digest for this layout.",
                remedy="Run the same version of loraplex on both sides.",
            )

    def fetch(
        self, ref: str, known_digest: str, metadata: _Metadata = (), options: PackOptions = EXACTLY
    ) -> PackedAdapter | None:
        """The adapter that `ref` means now, packed with `options`, verified; None when it is still `known_digest`.

        Raises the store's error; CorruptAdapter when size, layout or sha256 are wrong twice; StoreUnavailable.
        """
        try:
            return self._fetch_once(ref, known_digest, metadata, options)
        except UnknownLayout:  # the store lost its folder since our start
            self.register_layout(self._fetch_timeout_s)
        except CorruptAdapter as error:  # the store packs a file again once it has noticed that it is damaged
            _log.warning("a damaged adapter arrived; fetching it once more", reason=error.message)
        try:
            return self._fetch_once(ref, known_digest, metadata, options)
        except CorruptAdapter as error:
            raise CorruptAdapter(
                error.message, remedy=error.remedy or _CORRUPT, retry_after_s=error.retry_after_s or _RETRY_AFTER_S
            ) from error

    def _fetch_once(
        self, ref: str, known_digest: str, metadata: _Metadata, options: PackOptions
    ) -> PackedAdapter | None:
        request = adapter_store_pb2.FetchAdapterRequest(
            ref=ref, layout_digest=self._layout.digest, known_digest=known_digest, options=options.to_proto()
        )
        call = self._fetch(request, timeout=self._fetch_timeout_s, metadata=metadata)
        try:
            return self._receive(call, known_digest)
        except grpc.RpcError as error:
            raise self._translate(error) from error
        finally:
            call.cancel()

    def _receive(self, messages: _Messages, known_digest: str) -> PackedAdapter | None:
        first = next(messages, None)
        if first is None or isinstance(first, memoryview) or first.WhichOneof("payload") != "header":
            raise CorruptAdapter("The adapter store sent no header.")
        if first.header.unchanged:
            if not known_digest or first.header.digest != known_digest:
                raise CorruptAdapter("The adapter store called an adapter unchanged that was not asked for.")
            return None
        header = PackedHeader.from_proto(first.header)
        rows_bytes = header.rows_bytes(self._layout)
        rows_start = header.size_bytes - rows_bytes
        if rows_start > _MAX_FILE_HEADER_BYTES:
            raise CorruptAdapter(f"{header.digest[:12]} has {rows_start} bytes besides its rows.")
        file = torch.empty(header.size_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        self._fill(memoryview(file.numpy().data), messages, header)
        if 8 + int.from_bytes(file[:8].numpy().tobytes(), "little") != rows_start:
            raise CorruptAdapter(f"The rows in {header.digest[:12]} do not have the size that its header claims.")
        dtype = TORCH_DTYPES[self._layout.dtype]
        data = file[rows_start:]
        if rows_start % DTYPE_SIZES[self._layout.dtype]:
            data = data.clone()  # a safetensors header is padded to 8 bytes, but nothing promises it
        return PackedAdapter(header, data.view(dtype).view(header.rank, -1))

    def _fill(self, buffer: memoryview, messages: Iterator[object], header: PackedHeader) -> None:
        digest, received = hashlib.sha256(), 0
        for chunk in messages:
            if not isinstance(chunk, memoryview):
                raise CorruptAdapter("The adapter store sent a second header.")
            if received + len(chunk) > header.size_bytes:
                raise CorruptAdapter(f"More than the {header.size_bytes} bytes of {header.digest[:12]} arrived.")
            buffer[received : received + len(chunk)] = chunk
            digest.update(chunk)
            received += len(chunk)
        if received != header.size_bytes:
            raise CorruptAdapter(f"{received} of the {header.size_bytes} bytes of {header.digest[:12]} arrived.")
        if digest.hexdigest() != header.digest:
            raise CorruptAdapter(f"The bytes of {header.digest[:12]} do not have that sha256.")

    def _translate(self, error: grpc.RpcError) -> ServiceError:
        translated = from_rpc_error(error, self._target)
        if isinstance(translated, ServiceUnavailable | ShuttingDown | InternalError | DeadlineExceeded | Cancelled):
            return StoreUnavailable(
                f"The adapter store failed: {translated.message}",
                remedy="Try again; if it stays, look at its log.",
                retry_after_s=translated.retry_after_s or _RETRY_AFTER_S,
            )
        return translated
