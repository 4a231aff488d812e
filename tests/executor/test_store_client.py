"""The executor's side of the adapter store, over real gRPC on loopback."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from executor.store_client import StoreClient, parse_response
from loraplex.errors import (
    AdapterNotFound,
    AdapterRejected,
    CorruptAdapter,
    InternalError,
    ServiceError,
    ShuttingDown,
    StoreUnavailable,
    UnknownLayout,
)
from loraplex.v1 import adapter_store_pb2 as pb

from .fake_store import Answers, FakeStore, StoreServer, chunks, header_of, packed_file
from .samples import packed, small_layout

LAYOUT = small_layout()


@pytest.fixture
def client(store_server: StoreServer) -> Iterator[StoreClient]:
    """A client that has registered its layout."""
    connected = StoreClient(store_server.address, LAYOUT, fetch_timeout_s=10.0, pin_memory=False)
    connected.register_layout(10.0)
    yield connected
    connected.close()


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("modules", [(0, 1, 2, 3), (2,), (0, 3)])
def test_a_fetched_adapter_has_the_rows_of_the_file(
    store: FakeStore, store_server: StoreServer, dtype: str, modules: tuple[int, ...]
) -> None:
    layout = small_layout(dtype)
    store.adapters["a"] = sent = packed(layout, 3, modules)
    client = StoreClient(store_server.address, layout, fetch_timeout_s=10.0, pin_memory=False)
    client.register_layout(10.0)
    got = client.fetch("a", "")
    client.close()
    assert got is not None
    assert torch.equal(got.rows, sent.rows)
    assert (got.header.rank, got.header.module_indexes, got.header.commit) == (3, modules, "c" * 40)


def test_an_adapter_of_many_chunks_arrives_whole(store: FakeStore, client: StoreClient) -> None:
    store.adapters["a"] = sent = packed(LAYOUT, 12_000)
    got = client.fetch("a", "")
    assert got is not None
    assert torch.equal(got.rows, sent.rows)


def test_an_unchanged_adapter_is_not_sent_again(store: FakeStore, client: StoreClient) -> None:
    store.adapters["a"] = packed(LAYOUT, 3)
    first = client.fetch("a", "")
    assert first is not None
    assert client.fetch("a", first.header.digest) is None
    store.adapters["a"] = packed(LAYOUT, 3, seed=1)  # known failure 136: the same name means something else now
    second = client.fetch("a", first.header.digest)
    assert second is not None
    assert torch.equal(second.rows, store.adapters["a"].rows)


def test_the_request_id_travels_with_the_fetch(store: FakeStore, client: StoreClient) -> None:
    store.adapters["a"] = packed(LAYOUT, 3)
    client.fetch("a", "", (("x-request-id", "req-7"),))
    assert store.metadata["x-request-id"] == "req-7"


DATA = packed_file(packed(LAYOUT, 3))
HEADER = header_of(packed(LAYOUT, 3), DATA)


def header(**fields: object) -> pb.FetchAdapterResponse:
    changed = pb.AdapterHeader()
    changed.CopyFrom(HEADER)
    for name, value in fields.items():
        if name == "module_indexes":
            del changed.module_indexes[:]
            changed.module_indexes.extend(value)  # type: ignore[arg-type]
        else:
            setattr(changed, name, value)
    return pb.FetchAdapterResponse(header=changed)


def answer(*messages: pb.FetchAdapterResponse) -> Callable[[pb.FetchAdapterRequest], Answers]:
    return lambda request: iter(messages)


ALL = tuple(chunks(DATA))


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param((), id="nothing"),
        pytest.param(ALL, id="no header"),
        pytest.param((pb.FetchAdapterResponse(), *ALL), id="no payload"),
        pytest.param((header(digest="0" * 64), *ALL), id="wrong sha256"),
        pytest.param((header(digest=HEADER.digest.upper()), *ALL), id="sha256 in capitals"),
        pytest.param((header(), pb.FetchAdapterResponse(chunk=DATA[:-1] + b"\xff")), id="one byte differs"),
        pytest.param((header(), pb.FetchAdapterResponse(chunk=DATA[:-1])), id="a byte short"),
        pytest.param((header(),), id="no chunks"),
        pytest.param((header(), *ALL, pb.FetchAdapterResponse(chunk=b"x")), id="a byte long"),
        pytest.param((header(), *ALL, *ALL), id="twice"),
        pytest.param((header(), header(), *ALL), id="a second header"),
        pytest.param((header(), *ALL, header()), id="a header at the end"),
        pytest.param((header(module_indexes=[0, 1, 2, 4]), *ALL), id="module beyond the layout"),
        pytest.param((header(module_indexes=[1, 0, 2, 3]), *ALL), id="modules out of order"),
        pytest.param((header(module_indexes=[]), *ALL), id="no modules"),
        pytest.param((header(rank=0), *ALL), id="rank 0"),
        pytest.param((header(rank=-1), *ALL), id="negative rank"),
        pytest.param((header(rank=4), *ALL), id="rank above the file's"),
        pytest.param((header(rank=2), *ALL), id="rank below the file's"),
        pytest.param((header(module_indexes=[0, 1]), *ALL), id="fewer modules than the file's"),
        pytest.param((header(size_bytes=-1), *ALL), id="negative size"),
        pytest.param((header(size_bytes=1 << 60), *ALL), id="a size beyond all memory"),
        pytest.param((header(unchanged=True),), id="unchanged, though nothing was known"),
    ],
)
def test_a_wrong_answer_is_corrupt(
    store: FakeStore, client: StoreClient, messages: tuple[pb.FetchAdapterResponse, ...]
) -> None:
    store.answer = answer(*messages)
    with pytest.raises(CorruptAdapter) as failed:
        client.fetch("a", "")
    assert (bool(failed.value.remedy), failed.value.retry_after_s) == (True, 1.0)
    assert len(store.requests) == 2


def test_an_adapter_that_arrives_damaged_is_fetched_once_more(store: FakeStore, client: StoreClient) -> None:
    damaged = (header(), pb.FetchAdapterResponse(chunk=DATA[:-1] + b"\xff"))

    def heals(request: pb.FetchAdapterRequest) -> Answers:
        return iter(damaged if len(store.requests) == 1 else (header(), *ALL))

    store.answer = heals
    got = client.fetch("a", "")
    assert got is not None
    assert torch.equal(got.rows, packed(LAYOUT, 3).rows)


def test_the_store_may_cut_chunks_as_it_likes(store: FakeStore, client: StoreClient) -> None:
    for size in (1, 7, 127, 128, 129, len(DATA)):
        store.answer = answer(header(), pb.FetchAdapterResponse(chunk=b""), *chunks(DATA, size))
        got = client.fetch("a", "")
        assert got is not None
        assert torch.equal(got.rows, packed(LAYOUT, 3).rows)


def test_a_lost_layout_is_registered_again_once(store: FakeStore, client: StoreClient) -> None:
    store.adapters["a"] = packed(LAYOUT, 3)
    store.layouts.clear()
    assert client.fetch("a", "") is not None
    assert (store.registered, len(store.requests)) == (2, 2)


def test_a_layout_that_the_store_never_keeps_is_an_error_and_no_loop(store: FakeStore, client: StoreClient) -> None:
    def forgetful(request: pb.FetchAdapterRequest) -> Answers:
        raise UnknownLayout("Never heard of it.")

    store.answer = forgetful
    with pytest.raises(UnknownLayout):
        client.fetch("a", "")
    assert len(store.requests) == 2


def test_a_refusal_of_the_store_arrives_as_it_was_raised(store: FakeStore, client: StoreClient) -> None:
    store.failures["bad"] = AdapterRejected(
        "It holds NaN.", remedy="Train it again.", metadata={"cause": "NOT_FINITE", "key": "to_q.lora_A"}
    )
    with pytest.raises(AdapterRejected) as refused:
        client.fetch("bad", "")
    error = refused.value
    assert (error.cause, error.key, error.remedy) == ("NOT_FINITE", "to_q.lora_A", "Train it again.")
    with pytest.raises(AdapterNotFound):
        client.fetch("missing", "")


@pytest.mark.parametrize("failure", [InternalError("boom"), ShuttingDown("bye")])
def test_a_store_that_fails_or_stops_is_unavailable(
    store: FakeStore, client: StoreClient, failure: ServiceError
) -> None:
    store.failures["a"] = failure  # to the caller "shutting down" would mean the executor
    with pytest.raises(StoreUnavailable, match="adapter store"):
        client.fetch("a", "")


def test_a_store_that_is_down_is_unavailable(client: StoreClient, store_server: StoreServer) -> None:
    store_server.stop()
    with pytest.raises(StoreUnavailable) as failed:
        client.fetch("a", "")
    assert failed.value.remedy
    assert failed.value.retry_after_s == 1.0


def test_a_store_that_comes_back_after_a_while_is_reached_within_two_seconds(
    store: FakeStore, client: StoreClient, store_server: StoreServer
) -> None:
    store.adapters["a"] = packed(LAYOUT, 3)
    store_server.stop()
    until = time.monotonic() + 5.5
    while time.monotonic() < until:  # as requests would, which keep gRPC trying
        with pytest.raises(StoreUnavailable):
            client.fetch("a", "")
        time.sleep(0.1)
    with StoreServer(store, store_server.address):
        give_up = time.monotonic() + 2
        while time.monotonic() < give_up:
            with contextlib.suppress(StoreUnavailable):
                assert client.fetch("a", "") is not None
                return
            time.sleep(0.1)
    raise AssertionError("the store is not reached again")


def test_a_store_that_never_starts_is_unavailable_after_the_wait(nobody: str) -> None:
    client = StoreClient(nobody, LAYOUT, fetch_timeout_s=1.0, pin_memory=False)
    with pytest.raises(StoreUnavailable):
        client.register_layout(0.3)
    client.close()


def test_a_fetch_that_takes_too_long_is_given_up(store: FakeStore, store_server: StoreServer) -> None:

    store.held["slow"] = threading.Event()
    client = StoreClient(store_server.address, LAYOUT, fetch_timeout_s=0.3, pin_memory=False)
    client.register_layout(10.0)
    with pytest.raises(StoreUnavailable):
        client.fetch("slow", "")
    store.held["slow"].set()
    client.close()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 16_383, 16_384, 65_536, 2_097_151, 2_097_152])
def test_a_chunk_is_read_as_protobuf_reads_it(size: int) -> None:
    message = pb.FetchAdapterResponse(chunk=b"\x12" * size)
    parsed = parse_response(message.SerializeToString())
    assert isinstance(parsed, memoryview)
    assert parsed == message.chunk


@pytest.mark.parametrize("message", [pb.FetchAdapterResponse(), pb.FetchAdapterResponse(header=HEADER)])
def test_any_other_message_is_left_to_protobuf(message: pb.FetchAdapterResponse) -> None:
    assert parse_response(message.SerializeToString()) == message


@pytest.mark.parametrize("data", [b"\x12", b"\x12\x80", b"\x12\x03ab", b"\x12\x01ab", b"\x12\xff\xff\xff\xff\x0fab"])
def test_a_chunk_of_the_wrong_length_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptAdapter):
        parse_response(data)
