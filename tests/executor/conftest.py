"""The tiny base model, loaded once for all tests, and a fake adapter store on loopback."""

import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from grpc import aio

from executor.config import ExecutorSettings
from executor.service import ExecutorService, LoadedModel, load_model
from loraplex.layout import Layout
from loraplex.serving import serving
from loraplex.v1 import executor_pb2_grpc

from .calls import Stub, residents
from .fake_store import FakeStore, StoreServer


@pytest.fixture(scope="session")
def settings() -> ExecutorSettings:
    """Settings for the base model of this repository, without compilation."""
    return ExecutorSettings(
        base_model="models/tiny_flux/base",
        resolutions="64x64",  # type: ignore[arg-type]
        max_sequence_length=16,
        compile="off",
        threads=1,
        arena_rows=33,
        rows_per_sample=16,
        batch_wait_ms=50,  # so that jobs which run together do share batches on a busy machine
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
    )


@pytest.fixture(scope="session")
def model(settings: ExecutorSettings) -> Iterator[LoadedModel]:
    """The base model with 32 rows for adapters; all tests share its engine."""
    loaded = load_model(settings)
    yield loaded
    loaded.engine.close()


@pytest.fixture(scope="session", autouse=True)
def compilation_is_allowed_again() -> Iterator[None]:
    """After its warm-up an executor forbids compilation in its whole process, here that of all tests."""
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def store() -> FakeStore:
    """What the fake store answers."""
    return FakeStore()


@pytest.fixture
def store_server(store: FakeStore) -> Iterator[StoreServer]:
    """`store` behind a real gRPC server on loopback."""
    with StoreServer(store) as server:
        yield server


@pytest.fixture
async def service(settings: ExecutorSettings, store_server: StoreServer) -> AsyncIterator[Stub]:
    """A stub of an executor that serves; afterwards nothing may be pinned."""
    own = settings.model_copy(update={"store": store_server.address, "max_queue_length": 3, "store_wait_s": 10.0})
    async with serving(ExecutorService(own), own) as address, aio.insecure_channel(address) as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)
        yield stub
        assert {one.pins for one in (await residents(stub)).residents} <= {0}


@pytest.fixture
def layout(model: LoadedModel) -> Layout:
    """The layout of the base model."""
    return model.layout


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
