"""An executor's life: load the base model, attach the arena, compile, warm up, serve, drain, close."""

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import grpc.aio
import structlog
import torch

from executor.adapters import HostAdapters
from executor.arena import TORCH_DTYPES, Arena, RowTable
from executor.compilation import compiled_denoisers, compiled_graphs
from executor.compile_cache import compile_cache, machine_facts
from executor.config import ExecutorSettings
from executor.engine import Engine
from executor.jobs import Event, Failed, Finished, Job, Parameters
from executor.lora import attach
from executor.memory import account, choose_rows
from executor.pipeline import BasePipeline, load
from executor.probe import probe
from executor.recipe import apply_recipe
from executor.scheduler import BatchPolicy
from executor.server import ExecutorServicer, Parts
from executor.store_client import PackedAdapter, StoreClient
from loraplex.layout import Layout
from loraplex.pack_options import PackOptions
from loraplex.serving import outgoing_metadata
from loraplex.targets import read_layout
from loraplex.v1 import executor_pb2_grpc

# The settings that decide about compiled code.
_SHAPING_SETTINGS = {
    *("quantization", "text_encoder_quantization", "attention_backend", "vae_tiling"),
    *("compile", "batch_sizes", "resolutions", "rows_per_sample", "max_sequence_length", "threads"),
    "default_num_frames",
}

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
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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
        """Load and warm up the model, make its layout known to the store; then requests can come."""
        self.model = model = await asyncio.to_thread(load_model, self._settings)
        self._store = store = StoreClient(
            self._settings.store,
            model.layout,
            fetch_timeout_s=self._settings.fetch_timeout_s,
            pin_memory=model.device.type == "cuda",
        )
        await asyncio.to_thread(store.register_layout, self._settings.store_wait_s)
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
