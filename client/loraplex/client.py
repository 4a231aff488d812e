"""The client: generations as streams of typed events, and questions to both services. Synchronous, thread-safe."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
import PIL.Image
from typing_extensions import Self, Unpack

from loraplex.channel import CLIENT_OPTIONS
from loraplex.checks import check_text, check_timeout
from loraplex.descriptions import Inspection, ListedAdapter, Model, PrefetchProgress, Residents
from loraplex.errors import InternalError, InvalidRequest
from loraplex.events import AdapterReady, Event, Image, Summary, event_from_proto
from loraplex.options import GenerateOptions, generate_request
from loraplex.pack_options import EXACTLY, PackOptions
from loraplex.request_ids import HEADER, is_request_id, new_request_id
from loraplex.status import from_rpc_error
from loraplex.v1 import adapter_store_pb2, adapter_store_pb2_grpc, executor_pb2, executor_pb2_grpc

DEFAULT_EXECUTOR = "127.0.0.1:50061"
DEFAULT_STORE = "127.0.0.1:50051"

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Result:
    """A finished generation: the images, decoded and as they came, and what was done for them.

    A video is its frames: `images` are those of all videos in order, `frames` those of each.
    """

    images: tuple[PIL.Image.Image, ...]
    encoded: tuple[Image, ...]
    adapters: tuple[AdapterReady, ...]
    summary: Summary

    @property
    def image(self) -> PIL.Image.Image:
        """The first image."""
        return self.images[0]

    @property
    def frames(self) -> tuple[tuple[PIL.Image.Image, ...], ...]:
        """The frames of each video; of an image just that."""
        pairs = zip(self.encoded, self.images, strict=True)
        by_index: dict[int, list[PIL.Image.Image]] = {}
        for encoded, image in pairs:
            by_index.setdefault(encoded.index, []).append(image)
        return tuple(map(tuple, by_index.values()))

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """The result of a whole stream of events."""
        seen = list(events)
        images = tuple(sorted((e for e in seen if isinstance(e, Image)), key=lambda image: (image.index, image.frame)))
        summaries = [event for event in seen if isinstance(event, Summary)]
        if not images or not summaries:
            raise InternalError("The stream ended without image and summary.", remedy="Look at the executor's log.")
        return cls(
            images=tuple(image.to_pil() for image in images),
            encoded=images,
            adapters=tuple(event for event in seen if isinstance(event, AdapterReady)),
            summary=summaries[-1],
        )


class Stream(Generic[Item]):
    """The messages of one call as they arrive. Closing it, leaving its `with`, or dropping it cancels the call."""

    def __init__(self, call: Any, item: Callable[[Any], Item | None], target: str) -> None:
        self._call = call
        self._item = item
        self._target = target
        self._closed = False

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """The next item; ServiceError when the call failed."""
        while not self._closed:
            try:
                item = self._item(next(self._call))
            except grpc.RpcError as error:
                self._closed = True
                raise from_rpc_error(error, self._target) from error
            if item is not None:
                return item
        raise StopIteration

    def close(self) -> None:
        """Cancel the call, unless it has ended; the service stops working for it at the next step."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A connection to an executor and, for questions about adapters, to a store.

    Addresses come from the arguments, else from LORAPLEX_EXECUTOR and LORAPLEX_STORE, else are this machine's.
    Nothing is connected before the first call. Failures raise the classes of `loraplex.errors`.
    """

    def __init__(self, executor: str | None = None, store: str | None = None, *, timeout_s: float = 120.0) -> None:
        self.executor = check_text(executor or os.environ.get("LORAPLEX_EXECUTOR") or DEFAULT_EXECUTOR, "executor")
        self.store = check_text(store or os.environ.get("LORAPLEX_STORE") or DEFAULT_STORE, "store")
        self.timeout_s = check_timeout(timeout_s)
        self._executor_channel = grpc.insecure_channel(self.executor, options=CLIENT_OPTIONS)
        self._store_channel = grpc.insecure_channel(self.store, options=CLIENT_OPTIONS)
        self._executor_stub = executor_pb2_grpc.ExecutorStub(self._executor_channel)
        self._store_stub = adapter_store_pb2_grpc.AdapterStoreStub(self._store_channel)

    def __repr__(self) -> str:
        return f"Client(executor={self.executor!r}, store={self.store!r}, timeout_s={self.timeout_s})"

    def generate(self, prompt: str, **options: Unpack[GenerateOptions]) -> Stream[Event]:
        """Start a generation; iterate over its events, of which the last is the Summary. See GenerateOptions."""
        request = generate_request(prompt, options)
        timeout_s = options.get("timeout_s")
        call = self._executor_stub.Generate(
            request,
            timeout=self.timeout_s if timeout_s is None else check_timeout(timeout_s),
            metadata=_metadata(options.get("request_id")),
        )
        return Stream(call, event_from_proto, self.executor)

    def generate_image(self, prompt: str, **options: Unpack[GenerateOptions]) -> Result:
        """Generate and wait: the images as PIL images, and what was done for them. See GenerateOptions."""
        with self.generate(prompt, **options) as events:
            return Result.of(events)

    def cancel(self, request_id: str) -> bool:
        """End the unfinished generations of this id, whoever started them; False when there are none.

        Their streams fail with Cancelled. The id is that of `generate`'s option `request_id`.
        """
        request = executor_pb2.CancelRequest(request_id=check_text(request_id, "request_id"))
        return self._answer(self._executor_stub.Cancel, request, self.executor).found

    def model(self) -> Model:
        """The base model that the executor serves and the limits of a request."""
        request = executor_pb2.GetModelRequest()
        return Model.from_proto(self._answer(self._executor_stub.GetModel, request, self.executor))

    def residents(self) -> Residents:
        """The adapters in the executor's rank rows now."""
        request = executor_pb2.ListResidentsRequest()
        return Residents.from_proto(self._answer(self._executor_stub.ListResidents, request, self.executor))

    def adapters(self) -> list[ListedAdapter]:
        """All adapters that the store can serve without a download, in the order of their references."""
        listed: list[ListedAdapter] = []
        token = ""
        while True:
            request = adapter_store_pb2.ListAdaptersRequest(page_size=1000, page_token=token)
            page = self._answer(self._store_stub.ListAdapters, request, self.store)
            listed += map(ListedAdapter.from_proto, page.adapters)
            token = page.next_page_token
            if not token:
                return listed

    def inspect(self, ref: str, *, layout_digest: str = "", options: PackOptions = EXACTLY) -> Inspection:
        """What an adapter's file contains and, for the layout named (`model().layout_digest`), whether it applies."""
        request = adapter_store_pb2.InspectAdapterRequest(
            ref=check_text(ref, "ref"), layout_digest=layout_digest, options=options.to_proto()
        )
        answer = self._answer(self._store_stub.InspectAdapter, request, self.store)
        return Inspection.from_proto(answer, with_layout=bool(layout_digest))

    def prefetch(
        self, ref: str, *, layout_digest: str | None = None, options: PackOptions = EXACTLY
    ) -> Stream[PrefetchProgress]:
        """Bring an adapter into the store's cache, packed for a layout (by default the executor's); iterate to wait.

        The last report has the stage "ready".
        """
        digest = self.model().layout_digest if layout_digest is None else layout_digest
        request = adapter_store_pb2.PrefetchRequest(
            ref=check_text(ref, "ref"), layout_digest=digest, options=options.to_proto()
        )
        call = self._store_stub.Prefetch(request, timeout=self.timeout_s, metadata=_metadata())
        return Stream(call, PrefetchProgress.from_proto, self.store)

    def close(self) -> None:
        """Close both connections; running calls are cancelled."""
        self._executor_channel.close()
        self._store_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _answer(self, method: Callable[..., Answer], request: Any, target: str) -> Answer:
        try:
            return method(request, timeout=self.timeout_s, metadata=_metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error, target) from error


def _metadata(request_id: str | None = None) -> tuple[tuple[str, str], ...]:
    if request_id is not None and not is_request_id(request_id):
        raise InvalidRequest(
            f"request_id {request_id!r} cannot be sent.",
            remedy="Use 1 to 128 letters, digits, or ._:/+=@- characters.",
            field="request_id",
        )
    return ((HEADER, request_id or new_request_id()),)
