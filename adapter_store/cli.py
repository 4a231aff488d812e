"""The command line beside serving: look at adapter files, convert them, and keep the cache in order.

Exit status: 0 when all went well (for `inspect`: the file is applicable, or readable where no base is named), 3 when a
file is refused or was damaged, 2 for wrong usage, 1 for everything else. Answers go to stdout, errors to stderr.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from adapter_store import terminal, upkeep, wire
from adapter_store.bases import find_base
from adapter_store.cache import PackedCache
from adapter_store.config import StoreSettings
from adapter_store.download import Limits, SourceFile, local_file
from adapter_store.hub import fetch_configs
from adapter_store.inspection import Examined, examine
from adapter_store.layouts import Layouts
from adapter_store.listing import list_adapters
from adapter_store.refs import AdapterRef
from adapter_store.resolve import local_source
from adapter_store.service import make_store
from adapter_store.source import Source
from adapter_store.store import Progress
from adapter_store.unpack import unpack as write_unpacked
from loraplex.errors import AdapterRejected, InvalidAdapterRef, InvalidRequest, ServiceError, UnknownLayout
from loraplex.layout import Layout
from loraplex.pack_options import PackOptions
from loraplex.serving import load_settings

PROG = "python -m adapter_store"
EXIT_FAILED, EXIT_USAGE, EXIT_REFUSED = 1, 2, 3

app = typer.Typer(name=PROG, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__)

FileOrRef = Annotated[str, typer.Argument(help="A file, or an adapter reference: org/name[@revision][:file].")]
Base = Annotated[
    str, typer.Option(help="The base model: flux.1-dev, sdxl-base-1.0 ..., a diffusers folder, or a hub repository.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write; replaced if it exists.")]
Dtype = Annotated[Literal["BF16", "F16", "F32"], typer.Option(help="The dtype of the rank rows.")]
MaxRank = Annotated[int, typer.Option(help="The largest rank of a module; 0 is the store's.")]
MaxError = Annotated[
    float, typer.Option(help="How much of a module's difference a cut to that rank may lose; 0: none.")
]
Waive = Annotated[
    list[str] | None, typer.Option(help="What may be left out: a component, bias, norm or embedding; repeat it.")
]
Denoiser = Annotated[str, typer.Option(help="transformer or transformer_2, where the base has both.")]
CacheDir = Annotated[Path | None, typer.Option(help="The store's cache; by default as the store's settings say.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command()
def inspect(
    file: FileOrRef,
    base: Base = "",
    dtype: Dtype = "BF16",
    max_rank: MaxRank = 0,
    max_error: MaxError = 0.0,
    waive: Waive = None,
    denoiser: Denoiser = "",
    as_json: Json = False,
) -> None:
    """Tell what a file contains and, with a base, whether every tensor of it can be applied."""
    with _failures_reported(as_json):
        options = PackOptions(denoiser, tuple(waive or ()), max_rank, max_error).checked()
        layout = find_base(base, dtype, fetch_configs) if base else None
        examined = _examine(file, layout, options)
        report = wire.inspection(examined.report)
        terminal.print_message(report) if as_json else terminal.print_inspection(file, report, layout)
    if examined.report.rejection:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def pack(
    file: FileOrRef,
    base: Base,
    output: Output,
    dtype: Dtype = "BF16",
    max_rank: MaxRank = 0,
    max_error: MaxError = 0.0,
    waive: Waive = None,
    denoiser: Denoiser = "",
    as_json: Json = False,
) -> None:
    """Convert a file to the rank rows of a base: the bytes that a store would cache and send."""
    with _failures_reported(as_json):
        _check_folder(output)
        options = PackOptions(denoiser, tuple(waive or ()), max_rank, max_error).checked()
        layout = find_base(base, dtype, fetch_configs)
        partial = output.with_name(f".{output.name}.partial")
        partial.unlink(missing_ok=True)
        try:
            examined = _examine(file, layout, options, partial)
            if examined.written is None:
                raise examined.report.rejection or AssertionError("neither packed nor refused")
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
        report, written = wire.inspection(examined.report), examined.written
        facts = {"output": str(output), "digest": written.digest, "size_bytes": written.size_bytes}
        facts["rank"] = written.packed.rank
        if as_json:
            terminal.print_json({**facts, "layout_digest": layout.digest, "report": terminal.plain(report)})
        else:
            terminal.print_inspection(file, report, layout)
            terminal.print_facts(facts)


@app.command()
def unpack(
    packed: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A packed adapter.")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Write a packed adapter as an ordinary adapter file in the naming of diffusers and peft."""
    with _failures_reported(as_json):
        _check_folder(output)
        adapter = write_unpacked(packed, output)
        facts = {"output": str(output), "modules": len(adapter.modules), "tensors": len(adapter.tensors)}
        terminal.print_json(facts) if as_json else terminal.print_facts(facts)


@app.command("list")
def list_cached(cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """List the adapters in the local folders and in the cache."""
    with _failures_reported(as_json), _cache(cache_dir) as (cache, settings):
        listed = [wire.listed(one) for one in list_adapters(settings.local_roots, cache.entries())]
        terminal.print_json([terminal.plain(one) for one in listed]) if as_json else terminal.print_listed(listed)


@app.command()
def evict(
    which: Annotated[list[str] | None, typer.Argument(help="References, or digests of packed adapters.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every packed adapter.")] = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Remove packed adapters from the cache; safe while a store is running on it."""
    if everything == bool(which):
        raise typer.BadParameter("name references or digests, or give --all")
    chosen = set(which or ())
    with _failures_reported(as_json), _cache(cache_dir) as (cache, _):
        evicted = upkeep.evict(
            cache,
            lambda entry: everything or entry.digest in chosen or any(known.ref in chosen for known in entry.refs),
        )
        found = {entry.digest for entry in evicted.entries} | {k.ref for e in evicted.entries for k in e.refs}
        facts = {
            "evicted": sorted({entry.digest for entry in evicted.entries}),
            "freed_bytes": evicted.freed_bytes,
            "not_found": sorted(chosen - found),
        }
        terminal.print_json(facts) if as_json else terminal.print_facts(facts)
    if facts["not_found"]:
        raise typer.Exit(EXIT_FAILED)


@app.command("verify-cache")
def verify_cache(cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """Hash every packed file of the cache; what is damaged is removed, and made again when it is asked for."""
    with _failures_reported(as_json), _cache(cache_dir) as (cache, _):
        verified = upkeep.verify(cache)
        facts = {name: list(getattr(verified, name)) for name in type(verified).__dataclass_fields__}
        if as_json:
            terminal.print_json(facts)
        else:
            terminal.print_facts({name: len(names) for name, names in facts.items()})
    if verified.damaged or verified.missing:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def prefetch(
    refs: Annotated[list[str], typer.Argument(help="Adapter references.")],
    base: Base = "",
    dtype: Dtype = "BF16",
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Bring adapters into the cache: for a base, or for every layout that an executor has registered in it."""
    settings = _settings(cache_dir)
    with _failures_reported(as_json):
        layouts = Layouts(settings.cache_dir / "layouts")
        wanted = [layouts.register(find_base(base, dtype, fetch_configs).to_proto())] if base else layouts.all()
        if not wanted:
            remedy = "Name a base, or start an executor on this store once."
            raise UnknownLayout("No executor has registered a layout in this cache.", remedy=remedy)
        failed = asyncio.run(_prefetch(settings, refs, wanted, as_json))
    if failed:
        raise typer.Exit(EXIT_REFUSED if all(isinstance(one, AdapterRejected) for one in failed) else EXIT_FAILED)


async def _prefetch(
    settings: StoreSettings, refs: list[str], layouts: list[Layout], as_json: bool
) -> list[ServiceError]:
    store = make_store(settings)
    failed: list[ServiceError] = []

    async def one(ref: str, layout: Layout) -> None:
        report: Callable[[Progress], None] = lambda step: None if as_json else terminal.print_progress(ref, step)  # noqa: E731
        try:
            entry = (await store.prepare(ref, layout, report)).entry
            facts = {"ref": ref, "digest": entry.digest, "rank": entry.rank, "size_bytes": entry.size_bytes}
            terminal.print_json({**facts, "layout_digest": layout.digest}) if as_json else terminal.print_facts(facts)
        except ServiceError as error:
            failed.append(error)
            terminal.print_error(error, as_json, ref)

    try:
        await asyncio.gather(*(one(ref, layout) for ref in refs for layout in layouts))
    finally:
        await store.close()
    return failed


def _examine(text: str, layout: Layout | None, options: PackOptions, into: Path | None = None) -> Examined:
    settings = _settings(None)
    limits = Limits(settings.max_file_bytes, settings.download_timeout_s)
    source, file = _local(Path(text)) if Path(text).is_file() else asyncio.run(_fetched(text, settings))
    return examine(source, file, layout, limits, settings.max_rank, options, into)


def _local(path: Path) -> tuple[Source, SourceFile]:
    """A file of the caller's own, whatever its name; needs no cache."""
    path = path.resolve()
    source = local_source(AdapterRef("local", path.name), path, (path.parent,))
    return source, local_file(path, source.config_name)


async def _fetched(text: str, settings: StoreSettings) -> tuple[Source, SourceFile]:
    store = make_store(settings)
    try:
        return await store.fetch(text)
    finally:
        await store.close()


def _settings(cache_dir: Path | None) -> StoreSettings:
    """The store's settings from the environment."""
    return load_settings(StoreSettings, [f"--cache-dir={cache_dir}"] if cache_dir else [], PROG)


@contextmanager
def _cache(cache_dir: Path | None) -> Iterator[tuple[PackedCache, StoreSettings]]:
    settings = _settings(cache_dir)
    cache = PackedCache(settings.cache_dir, settings.cache_bytes)
    try:
        yield cache, settings
    finally:
        cache.close()


def _check_folder(output: Path) -> None:
    if not output.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.absolute().parent}", param_hint="--output")


@contextmanager
def _failures_reported(as_json: bool) -> Iterator[None]:
    try:
        yield
    except ServiceError as error:
        terminal.print_error(error, as_json)
        usage = isinstance(error, InvalidRequest | InvalidAdapterRef)
        status = EXIT_REFUSED if isinstance(error, AdapterRejected) else EXIT_USAGE if usage else EXIT_FAILED
        raise typer.Exit(status) from error
    except ImportError as error:
        terminal.print_import_error(error)
        raise typer.Exit(EXIT_FAILED) from error
