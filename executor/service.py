"""An executor's life: load the base model, attach the arena, compile, warm up, serve, drain, close."""

import asyncio
import contextvars
import functools
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import grpc.aio
import structlog
import torch

from executor.adapters import HostAdapters
from executor.arena import TORCH_DTYPES, Arena, RowTable
from executor.compilation import compiled_denoisers, compiled_graphs
from executor.compile_cache import abandon, compile_cache, machine_facts
from executor.config import ExecutorSettings
from executor.engine import Engine
from executor.errors import UnsupportedModel, UnsupportedOption
from executor.jobs import Event, Failed, Finished, Job, Parameters
from executor.lora import attach
from executor.memory import account, choose_rows
from executor.pipeline import BasePipeline, load
from executor.probe import probe
from executor.recipe import apply_recipe
from executor.scheduler import BatchPolicy
from executor.server import ExecutorServicer, Parts
from executor.store_client import PackedAdapter, StoreClient
from loraplex.channel import CLIENT_OPTIONS
from loraplex.errors import StoreUnavailable
from loraplex.layout import Layout
from loraplex.pack_options import PackOptions
from loraplex.serving import CannotStart, outgoing_metadata
from loraplex.targets import read_layout
from loraplex.v1 import executor_pb2_grpc

# The settings that decide about compiled code.
_SHAPING_SETTINGS = {
    *("quantization", "text_encoder_quantization", "attention_backend", "vae_tiling"),
    *("compile", "batch_sizes", "resolutions", "rows_per_sample", "max_sequence_length", "threads"),
    "default_num_frames",
}

_SAY_EVERY_S = 5.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

T = TypeVar("T")

_log = structlog.stdlib.get_logger("loraplex.executor")


@dataclass(frozen=True)
class LoadedModel:
    """A base model that is attached, running and warm."""

    base: BasePipeline
    layout: Layout
    arena: Arena
    table: RowTable
    engine: Engine
    device: torch.device


def load_model(settings: ExecutorSettings) -> LoadedModel:
    """Load, attach, compile and warm up the base model of `settings`. Blocks.

    Raises UnsupportedModel, UnsupportedOption and OSError.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = _device(settings.device)
    dtype = settings.dtype if settings.dtype != "auto" else ("F32" if device.type == "cpu" else "BF16")
    base = load(settings, device, TORCH_DTYPES[dtype])
    apply_recipe(base.pipeline, base.denoisers.values(), settings, device)
    smallest = min(settings.resolutions, key=lambda size: size[0] * size[1])
    found = probe(base, *smallest)
    base.batching = found.batching
    base.with_image = {mode: one for mode, one in base.with_image.items() if mode in found.modes}
    base.fit_previews(*smallest)
    layout = read_layout(base.adaptable, settings.base_model_name or settings.base_model, base.family_name, dtype)
    layout = replace(layout, modules=tuple(one for one in layout.modules if one.path not in found.excluded))
    arena = Arena(layout, choose_rows(settings, layout, device), device)
    table = RowTable(settings.batch_sizes[-1], settings.rows_per_sample, device)
    attach(base.adaptable, arena, table, found.folded)
    engine = Engine(
        base,
        arena,
        table,
        BatchPolicy(settings.batch_sizes, settings.batch_wait_ms / 1000),
        denoise=compiled_denoisers(base, settings.compile),
        max_running_jobs=settings.max_running_jobs,
    )
    shapes = settings.model_dump(include=_SHAPING_SETTINGS) | {
        "layout": layout.digest,
        "device": str(device),
        "rows": len(arena.rows),
    }
    try:
        cache_dir = None if settings.compile == "off" else settings.compile_cache_dir
        with compile_cache(cache_dir, shapes | machine_facts()):
            warm_up(base, engine, settings)
    except BaseException:
        engine.close()
        raise
    return LoadedModel(base, layout, arena, table, engine, device)


def warm_up(base: BasePipeline, engine: Engine, settings: ExecutorSettings) -> None:
    """Run every resolution at every batch size once, the whole way; after that a recompilation is an error."""
    for width, height in settings.resolutions:
        for batch_size in settings.batch_sizes:
            parameters = base.example(width, height, num_images=batch_size)
            finished = _run_to_the_end(engine, parameters)
            _log.info(
                "warmed up",
                resolution=f"{width}x{height}",
                batch_size=batch_size,
                seconds=round(finished.total_seconds, 1),
                compiled_graphs=compiled_graphs(),
            )
    engine.call(lambda: torch.compiler.set_stance("fail_on_recompile"))


def _run_to_the_end(engine: Engine, parameters: Parameters) -> Finished:
    events: asyncio.Queue[Event] = asyncio.Queue()
    loop = asyncio.new_event_loop()
    job = Job("warm-up", parameters, None, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))

    async def last_event() -> Event:
        engine.submit(job, ())
        while not isinstance(event := await events.get(), Finished | Failed):
            pass
        return event

    try:
        event = loop.run_until_complete(last_event())
    finally:
        loop.close()
    if isinstance(event, Failed):
        raise event.error
    assert isinstance(event, Finished)
    return event


def _device(name: str) -> torch.device:
    """The device of that name; UnsupportedOption when there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        why = "this torch is built without CUDA" if torch.version.cuda is None else f"{found} GPUs are found here"
        raise UnsupportedOption(f"device: {name}: {why}.")
    return device


def _check_base_model(name: str) -> None:
    """Raise CannotStart for what is neither a pipeline's folder nor can be a hub id."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise CannotStart(f"base_model: {name} holds no model_index.json; name the folder of a diffusers pipeline.")
    elif not _HUB_ID.fullmatch(name):
        raise CannotStart(f"base_model: {name} is neither a folder nor a hub id, as in org/name.")


async def _on_own_thread(function: Callable[[], T], discard: Callable[[T], None]) -> T:
    """`function()` on a thread that nobody waits for once this is cancelled; what it returns then goes to `discard`.

    `asyncio.to_thread` would keep the event loop, and so the process, until the function has returned.
    """
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function)
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            with suppress(InvalidStateError):
                done.set_exception(error)
            return
        try:
            done.set_result(result)
        except InvalidStateError:
            discard(result)

    threading.Thread(target=work, name="start", daemon=True).start()
    return await asyncio.wrap_future(done)


class ExecutorService:
    """What `loraplex.serving` runs."""

    name = "executor"
    grpc_services: tuple[str, ...] = ("loraplex.v1.Executor",)

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._servicer = ExecutorServicer(settings)
        self.model: LoadedModel | None = None
        self._store: StoreClient | None = None
        self._fetch_threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="fetch")

    def register(self, server: grpc.aio.Server) -> None:
        """Put the servicer on the server."""
        executor_pb2_grpc.add_ExecutorServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Find the store, load and warm up the model, make its layout known to the store; then requests can come."""
        settings = self._settings
        _check_base_model(settings.base_model)
        await self._until_store_listens()  # first: a warm-up may take minutes, and would be in vain
        _log.info(
            "loading and warming up: minutes where torch has to compile, else seconds",
            base_model=settings.base_model,
            compile=settings.compile,
            warm_up_runs=len(settings.resolutions) * len(settings.batch_sizes),
        )
        self.model = model = await self._loaded()
        self._store = store = StoreClient(
            settings.store,
            model.layout,
            fetch_timeout_s=settings.fetch_timeout_s,
            pin_memory=model.device.type == "cuda",
        )
        await self._until_store_listens()
        await asyncio.to_thread(store.register_layout, settings.store_wait_s)
        _log.info(
            "ready",
            base_model=model.layout.base_model,
            device=str(model.device),
            dtype=model.layout.dtype,
            modules=len(model.layout.modules),
            layout=model.layout.digest[:12],
        )
        _log.info("memory", **account(model.base.components, model.arena.rows, model.device))
        adapters = HostAdapters(self._fetch, self._settings.host_cache_bytes)
        self._servicer.parts = Parts(
            model.base, model.layout, len(model.arena.rows), model.engine, adapters, str(model.device)
        )

    async def _loaded(self) -> LoadedModel:
        try:
            return await _on_own_thread(
                functools.partial(load_model, self._settings), lambda model: model.engine.close()
            )
        except asyncio.CancelledError:
            abandon()
            raise
        except (UnsupportedModel, UnsupportedOption) as error:
            raise CannotStart(str(error)) from error
        except OSError as error:
            raise CannotStart(f"base_model: {self._settings.base_model}: {error}") from error

    async def _until_store_listens(self) -> None:
        """Wait for somebody to listen on the store's address, saying so; StoreUnavailable after `store_wait_s`."""
        target, wait_s = self._settings.store, self._settings.store_wait_s
        give_up = time.monotonic() + wait_s
        async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
            while (left := give_up - time.monotonic()) > 0:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(channel.channel_ready(), min(left, _SAY_EVERY_S))
                    return
                _log.warning("waiting for the adapter store", address=target, seconds_left=round(max(0, left)))
        raise StoreUnavailable(
            f"No adapter store listens on {target} (setting store), for {wait_s:g} s now.",
            remedy="Start it, or name its address.",
        )

    async def _fetch(self, ref: str, options: PackOptions, known_digest: str) -> PackedAdapter | None:
        assert self._store
        # A pool of its own, so that slow downloads hold up nothing but each other.
        call = functools.partial(self._store.fetch, ref, known_digest, outgoing_metadata(), options)
        return await asyncio.get_running_loop().run_in_executor(self._fetch_threads, call)

    async def drain(self) -> None:
        """Nothing to do before the calls have ended: the gate lets no new ones in."""

    async def close(self) -> None:
        """End the device thread and the fetches."""
        if self.model:
            await asyncio.to_thread(self.model.engine.close)
        if self._store:
            self._store.close()
        self._fetch_threads.shutdown(wait=False, cancel_futures=True)
