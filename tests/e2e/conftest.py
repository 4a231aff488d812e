"""Both services in this process, on loopback, with the denoiser compiled: one pair for all tests of this folder."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from adapter_store.config import StoreSettings
from adapter_store.service import AdapterStoreService
from executor.config import ExecutorSettings
from executor.service import ExecutorService
from loraplex.serving import serving
from tests.e2e.pair import ADAPTERS, BASE, MAX_SEQUENCE_LENGTH, DenoiserRecord, Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Store and executor, serving tiny-flux with its adapters and a folder that tests may write adapters to."""
    torch.compiler.set_stance("default")  # whatever was loaded before forbids compilation
    root = tmp_path_factory.mktemp("adapters")
    store_settings = StoreSettings(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        cache_dir=tmp_path_factory.mktemp("cache"),
        local_roots=(ADAPTERS, root),
    )
    started: list[Pair] = []
    failed: list[BaseException] = []
    ready, leave = threading.Event(), threading.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(serving(AdapterStoreService(store_settings), store_settings))
            settings = _executor_settings(store)
            service = ExecutorService(settings)
            executor = await stack.enter_async_context(serving(service, settings))
            assert service.model is not None
            started.append(Pair(executor, store, root, service.model))
            ready.set()
            await asyncio.to_thread(leave.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="services")
    thread.start()
    ready.wait()
    if failed:
        raise failed[0]
    yield started[0]
    leave.set()
    thread.join()


@pytest.fixture
def denoiser_record(pair: Pair) -> Iterator[DenoiserRecord]:
    """What the executor's pipelines ask of their denoiser, and what they get, while the test runs."""
    record, denoiser = DenoiserRecord(), pair.model.base.denoiser
    handed_off = denoiser.forward

    def recorded(**kwargs: Any) -> tuple[torch.Tensor]:
        output = handed_off(**kwargs)
        record.calls.append((kwargs, output[0]))
        return output

    denoiser.forward = recorded
    yield record
    denoiser.forward = handed_off


def _executor_settings(store: str) -> ExecutorSettings:
    return ExecutorSettings(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        base_model=str(BASE),
        base_model_name="tiny-flux",
        store=store,
        device="cpu",
        threads=1,
        resolutions=((64, 64),),
        arena_rows=64,
        rows_per_sample=32,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        # Long enough that jobs of a test share batches on a busy machine, too.
        batch_wait_ms=200,
        compile_cache_dir=None,  # the next run of the tests may find other code
    )
