"""From a reference to a packed adapter in the cache: the steps in order, once per key."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

import structlog

from adapter_store import metrics
from adapter_store import pack as packing
from adapter_store.cache import PackedCache
from adapter_store.download import DownloadsFiles, Limits, SourceFile, download
from adapter_store.entries import Entry, KnownRef
from adapter_store.fitting import FittedFile, fit_file
from adapter_store.flights import Flights
from adapter_store.inspection import Inspection, examine
from adapter_store.keys import cache_key
from adapter_store.refs import AdapterRef
from adapter_store.resolve import is_unchanged
from adapter_store.source import Source
from adapter_store.validate import RawFile, open_file
from loraplex.errors import AdapterRejected, SourceUnavailable
from loraplex.layout import Layout
from loraplex.pack_options import EXACTLY, PackOptions

T = TypeVar("T")
log = structlog.stdlib.get_logger("loraplex.store")

# A file that was written this recently may be written again without a new time stamp.
_SETTLED_S = 2.0


class Stage(Enum):
    """Where a preparation is."""

    RESOLVING = "resolving"
    DOWNLOADING = "downloading"
    PACKING = "packing"


@dataclass(frozen=True)
class Progress:
    """One report of a preparation."""

    stage: Stage
    downloaded_bytes: int = 0
    total_bytes: int = 0


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Prepared:
    """A packed adapter in the cache; `came_from` says what it took in this call."""

    entry: Entry
    commit: str
    came_from: Literal["cache", "local", "hub", "https", "fsspec"]


@dataclass(frozen=True)
class Wanted:
    """What a file is to be fitted to, and how."""

    layout: Layout
    options: PackOptions


class Resolves(Protocol):
    """What the store needs of a resolver; `resolve.Resolver` in production."""

    def resolve(self, ref: AdapterRef) -> Source:
        """The file that `ref` names now."""


class Store:
    """Prepares and inspects adapters. Event loop only; the steps themselves run in worker threads."""

    def __init__(
        self,
        resolver: Resolves,
        hub: DownloadsFiles,
        cache: PackedCache,
        limits: Limits,
        max_rank: int,
        conversions: int = 2,
        downloads: int = 16,
    ) -> None:
        self._resolver, self._hub, self.cache = resolver, hub, cache
        self._limits, self._max_rank = limits, max_rank
        self._converting = asyncio.Semaphore(conversions)
        # Pools of their own: a download that hangs must not keep the cache from answering.
        self._resolving = ThreadPoolExecutor(downloads, thread_name_prefix="resolve")
        self._downloading = ThreadPoolExecutor(downloads, thread_name_prefix="download")
        self._flights: Flights[Progress, Prepared] = Flights()

    async def prepare(
        self, text: str, layout: Layout, report: Report = lambda _: None, options: PackOptions = EXACTLY
    ) -> Prepared:
        """The adapter that `text` names, packed for `layout`, in the cache. `report` hears of every step."""
        wanted = Wanted(layout, self._settled(options))
        report(Progress(Stage.RESOLVING))
        source = await _in(self._resolving, self._resolver.resolve, AdapterRef.parse(text))
        work = partial(self._prepare, source, wanted)
        return await self._flights.join((source.identity, layout.digest, str(wanted.options)), work, report)

    async def inspect(self, text: str, layout: Layout | None, options: PackOptions = EXACTLY) -> Inspection:
        """What the file that `text` names contains, and whether it fits `layout`. Puts nothing in the cache."""
        source, file = await self.fetch(text)
        async with self._converting:
            examined = await asyncio.to_thread(examine, source, file, layout, self._limits, self._max_rank, options)
        return examined.report

    async def fetch(self, text: str) -> tuple[Source, SourceFile]:
        """The file that `text` names, on the disk as long as the SourceFile lives."""
        source = await _in(self._resolving, self._resolver.resolve, AdapterRef.parse(text))
        return source, await self._download(source, lambda _: None)

    def open(self, prepared: Prepared) -> AbstractContextManager[BinaryIO]:
        """The packed file, pinned while it is open. FileNotFoundError when another store evicted it: prepare again."""
        return self.cache.open(prepared.entry)

    async def close(self) -> None:
        """Stop what is under way, and close the cache."""
        self._hub.stop()
        await self._flights.close()
        for pool in (self._resolving, self._downloading):
            pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.cache.close)

    def _settled(self, options: PackOptions) -> PackOptions:
        """The options with the rank that they come to here: a cut to another rank is another adapter."""
        return dataclasses.replace(options, max_rank=options.limit(self._max_rank)) if options.max_error else options

    async def _prepare(self, source: Source, wanted: Wanted, report: Report) -> Prepared:
        known = await asyncio.to_thread(self._known_digests, source)
        if known and (hit := await asyncio.to_thread(self._cached, source, known, wanted)):
            return hit
        file = await self._download(source, report)
        digests = (file.digest, file.config_digest)
        if digests != known and (hit := await asyncio.to_thread(self._cached, source, digests, wanted)):
            return hit
        async with self._converting:
            report(Progress(Stage.PACKING))
            entry = await asyncio.to_thread(self._convert, source, file, wanted)
        return Prepared(entry, source.commit or file.digest, source.ref.source)

    async def _download(self, source: Source, report: Report) -> SourceFile:
        report(Progress(Stage.DOWNLOADING, 0, source.size_bytes))
        tell = lambda done, total: report(Progress(Stage.DOWNLOADING, done, total))  # noqa: E731
        try:
            file = await _in(self._downloading, download, source, self._hub, self._limits, tell)
        except AdapterRejected as error:
            metrics.rejections.labels(error.cause).inc()
            raise
        await asyncio.to_thread(self._note_digests, source, file)
        return file

    def _convert(self, source: Source, file: SourceFile, wanted: Wanted) -> Entry:
        """Steps 3 to 7, in a worker thread."""
        began_s = time.perf_counter()
        try:
            with open_file(file.path, self._limits.max_file_bytes) as raw:
                fitted = fit_file(raw, file.config, wanted.layout, wanted.options, self._max_rank)
                entry = self._pack(source, file, raw, fitted, wanted)
        except AdapterRejected as error:
            metrics.rejections.labels(error.cause).inc()
            log.info("adapter refused", cause=error.cause, source=file.digest)
            raise
        seconds = time.perf_counter() - began_s
        metrics.prepare_seconds.observe(seconds)
        facts = {"digest": entry.digest, "rank": entry.rank, "size_bytes": entry.size_bytes}
        log.info("adapter packed", **facts, seconds=round(seconds, 3))
        log.debug("adapter packed", digest=entry.digest, ref=source.canonical)
        return entry

    def _pack(self, source: Source, file: SourceFile, raw: RawFile, fitted: FittedFile, wanted: Wanted) -> Entry:
        """Steps 5 to 7."""
        layout, options, num_waived = wanted.layout, str(wanted.options), len(fitted.conversion.accounting.waived)
        with self.cache.temp_file(fitted.packing.largest_bytes) as temp:
            origin = packing.Origin(file.digest, file.config_digest, options, num_waived)
            written = packing.write(raw, fitted.packing, origin, temp)
            _check_unchanged(source)
            entry = Entry(
                key=cache_key(file.digest, file.config_digest, layout.digest, options),
                digest=written.digest,
                size_bytes=written.size_bytes,
                rank=written.packed.rank,
                module_indexes=written.packed.module_indexes,
                layout_digest=layout.digest,
                last_used_s=time.time(),
                refs=(_known_ref(source),),
                waived_tensors=num_waived,
                error=written.packed.error,
            )
            self.cache.add(entry, temp)
        return entry

    def _cached(self, source: Source, digests: tuple[str, str], wanted: Wanted) -> Prepared | None:
        key = cache_key(*digests, wanted.layout.digest, str(wanted.options))
        entry = self.cache.get(key, _known_ref(source))
        return Prepared(entry, source.commit or digests[0], "cache") if entry else None

    def _known_digests(self, source: Source) -> tuple[str, str] | None:
        """sha256 of the file and of its config, where they are known without reading them."""
        if source.sha256 and not source.config_name:
            return source.sha256, ""
        text = self.cache.read_note(f"digests:{source.identity}")
        return tuple(json.loads(text)) if text else None

    def _note_digests(self, source: Source, file: SourceFile) -> None:
        _check_unchanged(source)
        if source.path is None or time.time() - source.path.stat().st_mtime > _SETTLED_S:
            self.cache.note(f"digests:{source.identity}", json.dumps([file.digest, file.config_digest]))


async def _in(pool: ThreadPoolExecutor, step: Callable[..., T], *arguments: Any) -> T:
    """A step in a thread of a pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, step, *arguments)


def _known_ref(source: Source) -> KnownRef:
    return KnownRef(source.canonical, source.weight_name, source.ref.source == "local")


def _check_unchanged(source: Source) -> None:
    if not is_unchanged(source):
        message = "The file was changed while it was read."
        raise SourceUnavailable(message, remedy="Try again; replace files by renaming.", retry_after_s=1.0)
