"""What the store's command line shows."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from adapter_store.store import Progress
from loraplex.errors import ServiceError
from loraplex.layout import DTYPE_SIZES, Layout
from loraplex.v1 import adapter_store_pb2 as pb

_PIPE_WIDTH = 1 << 16


def plain(message: Message) -> Any:
    """A message as JSON has it: the fields by their names in the proto, all of them."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_json(fields: Any) -> None:
    """One JSON value on a line of its own."""
    typer.echo(json.dumps(fields))


def print_message(message: Message) -> None:
    """A message as JSON."""
    typer.echo(json.dumps(plain(message), indent=2))


def print_facts(facts: Mapping[str, Any]) -> None:
    """One fact per line."""
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        shown = ", ".join(map(str, fact)) if isinstance(fact, list) else str(fact)
        table.add_row(_text(name.replace("_", " "), style="dim"), _text(shown or "-"))
    _console().print(table)


def print_inspection(name: str, report: pb.InspectAdapterResponse, layout: Layout | None) -> None:
    """What a file contains, module by module, and the verdict."""
    per_component = Counter(module.component or "unknown component" for module in report.modules)
    facts = {
        "file": f"{name} ({_bytes(report.size_bytes)}, {report.tensors} tensors)",
        "sha256": report.source_digest,
        "naming": ", ".join(report.dialects),
        "family": report.family or "not recognised",
        **{f"in {component}": f"{count} modules" for component, count in sorted(per_component.items())},
    }
    print_facts(facts)
    if report.modules:
        _print_modules(report, layout is not None)
    accounted = f"{report.applied_tensors} applied, {report.zero_tensors} zero, {len(report.waived_keys)} waived"
    print_facts({"tensors": accounted, **_verdict(report, layout)})


def _verdict(report: pb.InspectAdapterResponse, layout: Layout | None) -> dict[str, Any]:
    if report.HasField("rejection"):
        why = report.rejection
        key = {"first bad key": why.key} if why.key else {}
        return {"verdict": f"refused, {why.cause}", "because": why.message, **key, "remedy": why.remedy}
    if layout is None:
        return {"verdict": "readable; name a base to know whether it applies"}
    rank = max(module.packed_rank for module in report.modules)
    width = sum(module.width for module in layout.modules if module.path in _paths(report))
    size = _bytes(rank * width * DTYPE_SIZES[layout.dtype])
    error = max(module.error for module in report.modules)
    cut = f", cut with a relative error of at most {error:.2g}" if error else ""
    return {"verdict": f"applicable to {layout.base_model}: {rank} rank rows, {size} in {layout.dtype}{cut}"}


def _paths(report: pb.InspectAdapterResponse) -> set[str]:
    return {f"{module.component}.{module.name}" for module in report.modules}


def _print_modules(report: pb.InspectAdapterResponse, is_packed: bool) -> None:
    """Modules that differ by their numbers only share a line: `#` stands for any of them."""
    lines: Counter[tuple[str, ...]] = Counter()
    for module in report.modules:
        name = re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", "#", module.name)
        alpha = f"{module.alpha:g}" if module.HasField("alpha") else "-"
        packed = (str(module.packed_rank or "-"),) if is_packed else ()
        lines[(name, module.component or "-", module.algorithm, str(module.rank), alpha, *packed)] += 1
    table = Table(Column("module", overflow="fold"), "component", "algorithm", "rank", "alpha", box=box.SIMPLE)
    for heading in ("rows", "modules") if is_packed else ("modules",):
        table.add_column(heading)
    for cells, count in lines.items():
        table.add_row(*map(_text, cells), str(count))
    _console().print(table)


def print_listed(adapters: Sequence[pb.ListedAdapter]) -> None:
    """A table of what the store can serve without a download."""
    table = Table(*(Column(name, overflow="fold") for name in ("adapter", "file", "where", "rank", "packed", "digest")))
    for adapter in adapters:
        where = "local folder" if adapter.local else "cache"
        size = sum(cached.size_bytes for cached in adapter.cached)
        ranks = ", ".join(str(cached.rank) for cached in adapter.cached) or "-"
        digests = ", ".join(cached.digest[:12] for cached in adapter.cached) or "-"
        cells = (adapter.ref, adapter.weight_name, where, ranks, _bytes(size) if size else "-", digests)
        table.add_row(*map(_text, cells))
    _console().print(table)


def print_progress(ref: str, step: Progress) -> None:
    """One line per stage and per tenth of a download."""
    done = f" {_bytes(step.downloaded_bytes)} of {_bytes(step.total_bytes)}" if step.total_bytes else ""
    _console(stderr=True).print(_text(f"{ref}: {step.stage.value}{done}", style="dim"))


def print_error(error: ServiceError, as_json: bool, ref: str = "") -> None:
    """Reason, message and remedy on stderr; with --json as one JSON value on stdout."""
    facts = {"field": error.field, "remedy": error.remedy, **dict(sorted(error.metadata.items()))}
    if as_json:
        about = {"ref": ref} if ref else {}
        print_json({"error": {**about, "reason": error.reason, "message": error.message, **facts}})
        return
    console = _console(stderr=True)
    heading = _text(f"{ref}: {error.reason}" if ref else error.reason, style="bold red")
    console.print(Text.assemble(heading, ": ", _text(error.message)), soft_wrap=True)
    for name, fact in facts.items():
        if fact:
            console.print(_text(f"  {name.replace('_', ' ')}: {fact}"), soft_wrap=True)


def print_import_error(error: ImportError) -> None:
    """What to install."""
    message = f"{error}. A base that is not in the catalogue needs: pip install 'loraplex[bases]'"
    _console(stderr=True).print(_text(message), soft_wrap=True)


def _console(stderr: bool = False) -> Console:
    """As wide as the terminal; in a pipe as wide as the text, so that nothing is cut or folded."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _text(words: str, style: str = "") -> Text:
    """A text as it is, whoever wrote it: what could command the terminal, or turn the line around, is spelled out."""
    safe = "".join(one if one.isprintable() else repr(one)[1:-1] for one in words)
    return Text(safe, style=style, overflow="fold")


def _bytes(size: int) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.1f} GB"
