"""What the command line shows: progress, tables, the closing line, errors."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import rich.progress
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from loraplex.client import Result
from loraplex.descriptions import Inspection, ListedAdapter, Model
from loraplex.errors import ServiceError
from loraplex.events import AdapterReady, Event, Image, Preview, Queued, StepDone


class Progress:
    """One bar on stderr that follows the events of a generation; nothing when stderr is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
        )
        self._bar = rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("connecting", total=None)

    def following(self, events: Iterable[Event]) -> Iterator[Event]:
        """Pass the events on, showing each."""
        for event in events:
            self.show(event)
            yield event

    def show(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Queued(requests_ahead=0):
                self._bar.update(self._task, description="admitted")
            case Queued():
                self._bar.update(self._task, description=f"queued behind {event.requests_ahead}")
            case AdapterReady():
                self._bar.update(self._task, description=f"{event.ref} ready from {event.ready_from}")
            case StepDone():
                done, total = event.step, event.num_inference_steps
                self._bar.update(self._task, description="denoising", completed=done, total=total)
            case Preview():
                pass  # it says no more than the step before it
            case Image(frame=frame) if frame:
                self._bar.update(self._task, description=f"video {event.index}, frame {frame}")
            case Image():
                self._bar.update(self._task, description=f"image {event.index}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()


def closing_line(paths: Sequence[Path], result: Result) -> str:
    """One line: the files, their seeds, the time taken, the adapters, the recompilations."""
    summary = result.summary
    adapters = ", ".join(f"{a.ref}:{a.strength:g} (rank {a.rank})" for a in summary.adapters) or "no adapter"
    seeds = ", ".join(str(image.seed) for image in result.encoded if image.frame == 0)
    parts = (
        " ".join(map(shown_path, paths) if len(paths) <= 8 else (shown_path(paths[0]), "…", shown_path(paths[-1]))),
        f"seed {seeds}",
        f"{summary.total_s:.2f} s",
        adapters,
        f"{summary.recompilations} recompilations",
    )
    return "  ".join(parts)


def shown_path(path: Path) -> str:
    """A path as it can be printed, whatever bytes are in it."""
    return os.fsencode(path).decode(errors="replace")


def print_failure(text: str) -> None:
    """One line on stderr."""
    Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)


def print_error(error: ServiceError) -> None:
    """The reason, the message and the remedy of an error, on stderr."""
    lines = [Text.assemble((error.reason, "bold red"), ": ", error.message)]
    facts = {"field": error.field, "remedy": error.remedy, **dict(sorted(error.metadata.items()))}
    if error.retry_after_s is not None:
        facts["retry after"] = f"{error.retry_after_s:g} s"
    lines += [Text(f"  {name.replace('_', ' ')}: {fact}") for name, fact in facts.items() if fact]
    console = Console(stderr=True)
    for line in lines:
        console.print(line, soft_wrap=True)


def print_json(described: Any) -> None:
    """A description as JSON on stdout; several as a list."""
    plain = [dataclasses.asdict(d) for d in described] if isinstance(described, list) else dataclasses.asdict(described)
    typer.echo(json.dumps(plain, indent=2, default=_plain))


def print_adapters(adapters: Sequence[ListedAdapter]) -> None:
    """A table of the store's adapters."""
    table = Table("adapter", "file", "where", "rank", "packed")
    for adapter in adapters:
        ranks = sorted({cached.rank for cached in adapter.cached})
        size = sum(cached.size_bytes for cached in adapter.cached)
        where = "local folder" if adapter.local else "hub, cached"
        rank = ", ".join(map(str, ranks)) or "-"
        table.add_row(*map(Text, (adapter.ref, adapter.weight_name, where, rank, _bytes(size) if size else "-")))
    Console().print(table)


def print_inspection(ref: str, inspection: Inspection) -> None:
    """What a file contains and whether it applies."""
    per_component: dict[str, list[int]] = {}
    for module in inspection.modules:
        per_component.setdefault(module.component or "unknown", []).append(module.rank)
    rows = {
        "file": f"{inspection.weight_name} ({_bytes(inspection.size_bytes)}, {inspection.tensors} tensors)",
        "commit": inspection.commit,
        "sha256": inspection.source_digest,
        "naming": ", ".join(inspection.dialects),
        "largest rank": str(inspection.rank),
        **{
            f"in {component}": f"{len(ranks)} modules, rank {_span(ranks)}"
            for component, ranks in sorted(per_component.items())
        },
        "applies": {True: "yes", False: "no", None: "unknown: no executor was reached"}[inspection.applicable],
    }
    if inspection.rejection:
        why = inspection.rejection
        rows |= {"because": f"{why.cause}: {why.message}", "first bad key": why.key or "-", "remedy": why.remedy}
    _print_facts(ref, rows)


def print_model(model: Model) -> None:
    """The model and its limits."""
    rows = {
        "family": f"{model.layout.family}, {model.layout.dtype}, {len(model.layout.modules)} target modules",
        "device": model.device,
        "makes": ", ".join(mode.replace("_", " ") for mode in model.modes) or "-",
        "resolutions": ", ".join(f"{width}x{height}" for width, height in model.resolutions),
        "steps": f"{model.default_num_inference_steps} by default, at most {model.max_num_inference_steps}",
        "guidance scale": f"{model.default_guidance_scale:g} by default",
        "images": f"at most {model.max_num_images} per request",
        **({"frames": f"at most {model.max_num_frames} per video"} if model.max_num_frames else {}),
        "ranks": f"at most {model.rows_per_sample} in one request, {model.arena_rows - 1} resident",
        "batch sizes": ", ".join(map(str, model.batch_sizes)),
        "queue": f"at most {model.max_queue_length} requests",
        "compiled graphs": str(model.compiled_graphs),
        "layout": model.layout_digest,
    }
    _print_facts(model.base_model, rows)


def _print_facts(title: str, facts: dict[str, str]) -> None:
    table = Table(title=Text(title), show_header=False, title_justify="left")
    for name, fact in facts.items():
        table.add_row(Text(name), Text(fact, overflow="fold"))
    Console().print(table)


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _bytes(size: int) -> str:
    if size < 1_000_000:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e6:.1f} MB"


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON")
