"""Step 8: the five calls. Proto in, domain inside, proto and bytes out."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import grpc
from grpc import aio

from adapter_store import metrics, wire
from adapter_store.layouts import Layouts
from adapter_store.listing import list_adapters, page
from adapter_store.store import Prepared, Progress, Store
from loraplex.errors import StoreUnavailable
from loraplex.layout import Layout
from loraplex.pack_options import PackOptions
from loraplex.packed import CHUNK_BYTES
from loraplex.v1 import adapter_store_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdapterStore"].full_name

Context: TypeAlias = "aio.ServicerContext[Any, Any]"

# One hop to a worker thread reads several chunks: a hop costs about as much as copying a chunk.
_READ_BYTES = 8 * CHUNK_BYTES
_ATTEMPTS = 3


class AdapterStoreServer:
    """The servicer. Errors leave as ServiceError; the interceptor of `loraplex.serving` gives them a status."""

    def __init__(self, store: Store, layouts: Layouts, roots: tuple[Path, ...]) -> None:
        self._store, self._layouts, self._roots = store, layouts, roots

    def register(self, server: aio.Server) -> None:
        """Add the calls to `server`. FetchAdapter has its own serialiser: its chunks are never built as messages."""
        streams, calls = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "RegisterLayout": calls(self.register_layout, pb.RegisterLayoutRequest.FromString, _serialize),
            "Prefetch": streams(self.prefetch, pb.PrefetchRequest.FromString, _serialize),
            "FetchAdapter": streams(self.fetch_adapter, pb.FetchAdapterRequest.FromString, wire.serialize_fetch),
            "InspectAdapter": calls(self.inspect_adapter, pb.InspectAdapterRequest.FromString, _serialize),
            "ListAdapters": calls(self.list_adapters, pb.ListAdaptersRequest.FromString, _serialize),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def register_layout(self, request: pb.RegisterLayoutRequest, _: Context) -> pb.RegisterLayoutResponse:
        """Keep a layout."""
        layout = await asyncio.to_thread(self._layouts.register, request.layout)
        return pb.RegisterLayoutResponse(layout_digest=layout.digest)

    async def prefetch(self, request: pb.PrefetchRequest, _: Context) -> AsyncIterator[pb.PrefetchResponse]:
        """Prepare an adapter, reporting on the way."""
        began_s = time.perf_counter()
        layout = await asyncio.to_thread(self._layouts.get, request.layout_digest)
        reports: asyncio.Queue[Progress | None] = asyncio.Queue()
        options = wire.options(request.options)
        task = asyncio.create_task(self._store.prepare(request.ref, layout, reports.put_nowait, options))
        task.add_done_callback(lambda _: reports.put_nowait(None))
        try:
            while (report := await reports.get()) is not None:
                yield wire.progress(report)
            header = wire.header(await task, time.perf_counter() - began_s)
            yield pb.PrefetchResponse(stage=pb.PREFETCH_STAGE_READY, header=header)
        finally:
            task.cancel()
            if task.done() and not task.cancelled():
                task.exception()  # looked at, in case the caller left before it was raised

    async def fetch_adapter(self, request: pb.FetchAdapterRequest, _: Context) -> AsyncIterator[wire.FetchPart]:
        """Prepare an adapter and stream it."""
        began_s = time.perf_counter()
        layout = await asyncio.to_thread(self._layouts.get, request.layout_digest)
        with contextlib.ExitStack() as stack:
            prepared, stream = await self._open(request.ref, layout, wire.options(request.options), stack)
            unchanged = prepared.entry.digest == request.known_digest
            seconds = time.perf_counter() - began_s
            yield pb.FetchAdapterResponse(header=wire.header(prepared, seconds, unchanged))
            if not unchanged:
                async for chunk in _chunks(stream):
                    metrics.fetch_bytes.inc(chunk.nbytes)
                    yield chunk
        metrics.fetch_seconds.labels(prepared.came_from).observe(time.perf_counter() - began_s)

    async def _open(
        self, ref: str, layout: Layout, options: PackOptions, stack: contextlib.ExitStack
    ) -> tuple[Prepared, BinaryIO]:
        """The packed file of `ref`, open and pinned until `stack` ends."""
        for _ in range(_ATTEMPTS):
            prepared = await self._store.prepare(ref, layout, options=options)
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile by another store on the same folder
                return prepared, stack.enter_context(self._store.open(prepared))
        message = "The packed adapter was evicted again and again before it could be sent."
        raise StoreUnavailable(message, remedy="Raise the store's cache_bytes.", retry_after_s=1.0)

    async def inspect_adapter(self, request: pb.InspectAdapterRequest, _: Context) -> pb.InspectAdapterResponse:
        """Describe a file."""
        digest = request.layout_digest
        layout = await asyncio.to_thread(self._layouts.get, digest) if digest else None
        return wire.inspection(await self._store.inspect(request.ref, layout, wire.options(request.options)))

    async def list_adapters(self, request: pb.ListAdaptersRequest, _: Context) -> pb.ListAdaptersResponse:
        """List what can be served without a download."""
        entries = await asyncio.to_thread(self._store.cache.entries)
        adapters, token = page(
            await asyncio.to_thread(list_adapters, self._roots, entries), request.page_size, request.page_token
        )
        return pb.ListAdaptersResponse(adapters=[wire.listed(one) for one in adapters], next_page_token=token)


async def _chunks(stream: BinaryIO) -> AsyncIterator[memoryview]:
    while block := await asyncio.to_thread(stream.read, _READ_BYTES):
        view = memoryview(block)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()
