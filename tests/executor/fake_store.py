"""An adapter store with hand-written answers behind a real gRPC server on loopback."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch
from grpc_status import rpc_status

from executor.store_client import PackedAdapter
from loraplex.errors import AdapterNotFound, ServiceError, UnknownLayout
from loraplex.layout import Layout
from loraplex.packed import CHUNK_BYTES
from loraplex.status import to_status
from loraplex.v1 import adapter_store_pb2 as pb
from loraplex.v1 import adapter_store_pb2_grpc

Answers = Iterator[pb.FetchAdapterResponse]


class FakeStore(adapter_store_pb2_grpc.AdapterStoreServicer):
    """Serves `adapters` by reference; `answer` replaces the answer of FetchAdapter."""

    def __init__(self) -> None:
        self.layouts: dict[str, Layout] = {}
        self.adapters: dict[str, PackedAdapter] = {}
        self.failures: dict[str, ServiceError] = {}
        self.answer: Callable[[pb.FetchAdapterRequest], Answers] | None = None
        self.registered = 0
        self.requests: list[pb.FetchAdapterRequest] = []
        self.metadata: dict[str, str | bytes] = {}
        self.held: dict[str, threading.Event] = {}

    def RegisterLayout(
        self, request: pb.RegisterLayoutRequest, context: grpc.ServicerContext
    ) -> pb.RegisterLayoutResponse:
        """Keep the layout."""
        layout = Layout.from_proto(request.layout)
        self.layouts[layout.digest] = layout
        self.registered += 1
        return pb.RegisterLayoutResponse(layout_digest=layout.digest)

    def FetchAdapter(self, request: pb.FetchAdapterRequest, context: grpc.ServicerContext) -> Answers:
        """The header and the bytes of an adapter, or its failure."""
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        try:
            yield from self.answer(request) if self.answer else self._answer(request)
        except ServiceError as error:
            context.abort_with_status(rpc_status.to_status(to_status(error)))

    def _answer(self, request: pb.FetchAdapterRequest) -> Answers:
        if request.layout_digest not in self.layouts:
            raise UnknownLayout("Never heard of it.")
        if request.ref in self.held:
            self.held[request.ref].wait(20)
        if request.ref in self.failures:
            raise self.failures[request.ref]
        if request.ref not in self.adapters:
            raise AdapterNotFound(f"There is no {request.ref}.", remedy="Look at the list.")
        data = packed_file(self.adapters[request.ref])
        header = header_of(self.adapters[request.ref], data)
        header.unchanged = request.known_digest == header.digest
        yield pb.FetchAdapterResponse(header=header)
        if not header.unchanged:
            yield from chunks(data)


def packed_file(adapter: PackedAdapter) -> bytes:
    """The safetensors file of a packed adapter."""
    rows = adapter.rows.contiguous()
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[rows.dtype]
    described = {"rows": {"dtype": dtype, "shape": list(rows.shape), "data_offsets": [0, rows.nbytes]}}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rows.view(torch.uint8).numpy().tobytes()


def header_of(adapter: PackedAdapter, data: bytes) -> pb.AdapterHeader:
    """The header that goes before `data`."""
    return pb.AdapterHeader(
        digest=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        rank=adapter.header.rank,
        module_indexes=adapter.header.module_indexes,
        commit=adapter.header.commit,
    )


def chunks(data: bytes, size: int = CHUNK_BYTES) -> Answers:
    """`data` in messages of at most `size` bytes."""
    for start in range(0, len(data), size):
        yield pb.FetchAdapterResponse(chunk=data[start : start + size])


class StoreServer:
    """A FakeStore that listens inside the `with` block."""

    def __init__(self, store: FakeStore, listen: str = "127.0.0.1:0") -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        adapter_store_pb2_grpc.add_AdapterStoreServicer_to_server(store, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(listen)}"

    def __enter__(self) -> "StoreServer":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for held in self.store.held.values():
            held.set()
        self.stop()

    def stop(self) -> None:
        """Stop listening."""
        self._server.stop(None).wait()
        self._pool.shutdown()
