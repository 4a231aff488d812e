"""Fakes of both services: real gRPC servers on loopback with hand-written servicers."""

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import PIL.Image
import pytest
from grpc_status import rpc_status

from loraplex import Client
from loraplex.errors import ServiceError
from loraplex.status import to_status
from loraplex.v1 import adapter_store_pb2, adapter_store_pb2_grpc, executor_pb2, executor_pb2_grpc, layout_pb2


class FakeExecutor(executor_pb2_grpc.ExecutorServicer):
    """Answers what it was told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.request = executor_pb2.GenerateRequest()
        self.metadata: dict[str, str] = {}
        self.failure: ServiceError | None = None
        self.hold = False
        self.format = executor_pb2.OUTPUT_FORMAT_PNG
        self.ended = threading.Event()
        self.cancelled: list[str] = []

    def Generate(self, request, context):
        """Queued, one adapter ready per adapter, two steps, the images, a summary; or the failure after Queued."""
        self.request, self.metadata = request, dict(context.invocation_metadata())
        context.add_callback(self.ended.set)
        yield executor_pb2.GenerateResponse(queued=executor_pb2.Queued(requests_ahead=2))
        if self.failure:
            context.abort_with_status(rpc_status.to_status(to_status(self.failure)))
        if self.hold:
            self.ended.wait(20)
            return
        yield from self._finish(request)

    def _finish(self, request):
        for adapter in request.adapters:
            ready = executor_pb2.AdapterReady(
                ref=adapter.ref, digest="d" * 64, rank=4, modules=9, ready_from=executor_pb2.READY_FROM_STORE
            )
            ready.fetch_duration.FromMilliseconds(1500)
            yield executor_pb2.GenerateResponse(adapter_ready=ready)
        for step in (1, 2):
            done = executor_pb2.StepDone(step=step, num_inference_steps=2)
            yield executor_pb2.GenerateResponse(step_done=done)
            if request.preview_every_steps and step % request.preview_every_steps == 0:
                preview = executor_pb2.Preview(step=step, index=0, data=_encoded("JPEG"))
                yield executor_pb2.GenerateResponse(preview=preview)
        for index in range(max(1, request.num_images)):
            for frame in range(max(1, request.num_frames)):
                yield executor_pb2.GenerateResponse(image=self._image(index, request.seed + index, frame))
        applied = [
            executor_pb2.AppliedAdapter(ref=a.ref, strength=a.strength, rank=4, modules=9) for a in request.adapters
        ]
        summary = executor_pb2.Summary(request_id=self.metadata["x-request-id"], adapters=applied, steps=2)
        summary.total_duration.FromMilliseconds(2500)
        yield executor_pb2.GenerateResponse(summary=summary)

    def _image(self, index, seed, frame):
        shade = (40 * frame, 40 * index, 0)
        data = _encoded("PNG", shade)
        return executor_pb2.Image(
            index=index, data=data, output_format=self.format, width=8, height=4, seed=seed, frame=frame
        )

    def Cancel(self, request, context):
        """Remember the id; only "known" was unfinished."""
        self.cancelled.append(request.request_id)
        return executor_pb2.CancelResponse(found=request.request_id == "known")

    def GetModel(self, request, context):
        """A model with one target module."""
        module = layout_pb2.TargetModule(
            component="transformer",
            name="proj",
            kind=layout_pb2.MODULE_KIND_LINEAR,
            in_features=8,
            out_features=8,
            kernel_height=1,
            kernel_width=1,
        )
        return executor_pb2.GetModelResponse(
            layout=layout_pb2.Layout(base_model="tiny", family="FluxPipeline", dtype="F32", modules=[module]),
            layout_digest="a" * 64,
            device="cpu",
            resolutions=[executor_pb2.Resolution(width=8, height=4)],
            max_num_images=4,
            modes=[executor_pb2.MODE_TEXT_TO_IMAGE, executor_pb2.MODE_INPAINT, 99],
            max_num_frames=81,
            arena_rows=16,
            rows_per_sample=8,
        )

    def ListResidents(self, request, context):
        """One resident."""
        return executor_pb2.ListResidentsResponse(
            residents=[executor_pb2.Resident(digest="d" * 64, rank=4, modules=9)], free_rows=12
        )


class FakeStore(adapter_store_pb2_grpc.AdapterStoreServicer):
    """Three adapters in pages of two."""

    def __init__(self) -> None:
        self.layout_digests: list[str] = []
        self.options: list[layout_pb2.PackOptions] = []

    def ListAdapters(self, request, context):
        """Two adapters, then one."""
        if request.page_token == "next":
            return adapter_store_pb2.ListAdaptersResponse(adapters=[_listed("sunset")])
        return adapter_store_pb2.ListAdaptersResponse(
            adapters=[_listed("neon"), _listed("sketch")], next_page_token="next"
        )

    def InspectAdapter(self, request, context):
        """A file with one module; refused for every layout."""
        self.options.append(request.options)
        self.layout_digests.append(request.layout_digest)
        rejection = adapter_store_pb2.Rejection(
            cause="NOT_FINITE", key="proj.lora_A", message="It holds NaN.", remedy="Train it again."
        )
        module = adapter_store_pb2.InspectedModule(component="transformer", name="proj", rank=4, alpha=8.0)
        return adapter_store_pb2.InspectAdapterResponse(
            weight_name="sketch.safetensors",
            dialects=["peft"],
            modules=[module],
            rank=4,
            rejection=rejection if request.layout_digest else None,
        )

    def Prefetch(self, request, context):
        """Downloading, then ready."""
        self.options.append(request.options)
        self.layout_digests.append(request.layout_digest)
        yield adapter_store_pb2.PrefetchResponse(
            stage=adapter_store_pb2.PREFETCH_STAGE_DOWNLOADING, downloaded_bytes=5, total_bytes=9
        )
        header = adapter_store_pb2.AdapterHeader(digest="d" * 64, rank=4, size_bytes=640)
        yield adapter_store_pb2.PrefetchResponse(stage=adapter_store_pb2.PREFETCH_STAGE_READY, header=header)


def _encoded(image_format: str, color: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    encoded = io.BytesIO()
    PIL.Image.new("RGB", (8, 4), color).save(encoded, image_format)
    return encoded.getvalue()


def _listed(ref: str) -> adapter_store_pb2.ListedAdapter:
    return adapter_store_pb2.ListedAdapter(ref=ref, weight_name=f"{ref}.safetensors", local=True)


@pytest.fixture
def executor() -> FakeExecutor:
    """The fake executor behind `client`."""
    return FakeExecutor()


@pytest.fixture
def store() -> FakeStore:
    """The fake store behind `client`."""
    return FakeStore()


@pytest.fixture
def address(executor: FakeExecutor, store: FakeStore) -> Iterator[str]:
    """The address at which both fakes listen."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        executor_pb2_grpc.add_ExecutorServicer_to_server(executor, server)
        adapter_store_pb2_grpc.add_AdapterStoreServicer_to_server(store, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        executor.ended.set()
        server.stop(None).wait()


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """A client of both fakes."""
    with Client(executor=address, store=address, timeout_s=20) as connected:
        yield connected


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
