"""Writes docs/reference.md, the tables of operations.md, from the code: settings, metrics, errors, causes, rows.

python -m docs.reference
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from prometheus_client.metrics import MetricWrapperBase
from pydantic_core import PydanticUndefined

import adapter_store.metrics
import executor.metrics
import loraplex.serving.metrics
from adapter_store.bases import known_bases, known_layout
from adapter_store.config import StoreSettings
from adapter_store.errors import REMEDIES
from docs.explanations import CAUSES, REASONS
from docs.refusals import refusals
from executor.config import ExecutorSettings
from loraplex.errors import ERRORS_BY_REASON
from loraplex.serving import ServingSettings

PATH = Path(__file__).with_name("reference.md")
_TITLE = """# Reference

Written by `python -m docs.reference` from the code; a test says when it is stale.
[operations.md](operations.md) explains what to do with it.
"""
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))
# Of a row, 64 rows and 1024 rows.
_ROWS = (1, 64, 1024)


def reference() -> str:
    """The whole document."""
    return "\n".join(
        [
            _TITLE,
            *_section("Settings of the adapter store", _settings(StoreSettings)),
            *_section("Settings of the executor", _settings(ExecutorSettings)),
            *_section("Metrics of both services", _metrics(loraplex.serving.metrics)),
            *_section("Metrics of the adapter store", _metrics(adapter_store.metrics)),
            *_section("Metrics of the executor", _metrics(executor.metrics)),
            *_section("Error reasons", _reasons()),
            *_section("Causes of a refusal", _causes()),
            *_section("Examples of refusals", _examples()),
            *_section("Rows of the well-known bases", _rows()),
        ]
    )


def _section(title: str, rows: Iterator[Sequence[str]]) -> list[str]:
    heading, *body = rows
    lines = [heading, ["---"] * len(heading), *body]
    return [f"## {title}\n", *(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines), ""]


def _settings(settings: type[ServingSettings]) -> Iterator[Sequence[str]]:
    yield "field", "flag", "variable", "default", "meaning"
    prefix = str(settings.model_config.get("env_prefix", ""))
    for name, field in settings.model_fields.items():
        default = "required" if field.default is PydanticUndefined else _shown(name, field.default)
        flag = f"`--{name.replace('_', '-')}`"
        yield f"`{name}`", flag, f"`{(prefix + name).upper()}`", default, _one_line(field.description or "")


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and value:
        size, unit = next((size, unit) for size, unit in (*_UNITS, (1, "bytes")) if value % size == 0)
        return f"{value} ({value // size} {unit})"
    if name == "resolutions":
        return ",".join(f"{width}x{height}" for width, height in value)
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value not in ("", None) else "empty"


def _metrics(module: ModuleType) -> Iterator[Sequence[str]]:
    yield "metric", "type", "labels", "meaning"
    for metric in vars(module).values():
        if isinstance(metric, MetricWrapperBase):
            about = next(iter(metric.describe()))
            name = f"{about.name}_total" if about.type == "counter" else about.name
            # Nothing public of the library tells the labels.
            labels = ", ".join(f"`{label}`" for label in metric._labelnames) or "-"
            yield f"`{name}`", about.type, labels, about.documentation


def _reasons() -> Iterator[Sequence[str]]:
    yield "reason", "code", "when", "what to do", "worth a retry"
    _check_explained(REASONS, ERRORS_BY_REASON)
    for reason, error in ERRORS_BY_REASON.items():
        yield f"`{reason}`", error.code, *REASONS[reason]


def _causes() -> Iterator[Sequence[str]]:
    yield "cause", "when", "remedy"
    _check_explained(CAUSES, {cause.value: cause for cause in REMEDIES})
    for cause, remedy in REMEDIES.items():
        yield f"`{cause.value}`", CAUSES[cause.value], remedy


def _examples() -> Iterator[Sequence[str]]:
    yield "cause", "a file with", "what the store says of it"
    by_cause = {refusal.cause: refusal for refusal in refusals()}
    _check_explained({cause.value: cause for cause in by_cause}, {cause.value: cause for cause in REMEDIES})
    for cause in REMEDIES:
        yield f"`{cause.value}`", by_cause[cause].about, by_cause[cause].message()


def _rows() -> Iterator[Sequence[str]]:
    yield "base", "family", "components", "modules", "row, BF16", "64 rows", "1024 rows"
    for name, base in known_bases().items():
        layout = known_layout(name, name, "BF16")
        components = dict.fromkeys(module.component for module in layout.modules)
        sizes = (f"{layout.row_bytes * rows / 1e6:,.1f} MB" for rows in _ROWS)
        yield f"`{name}`", base["family"], ", ".join(components), str(len(layout.modules)), *sizes


def _check_explained(explained: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    if explained.keys() != known.keys():
        names = ", ".join(sorted(explained.keys() ^ known.keys()))
        raise SystemExit(f"{inspect.getfile(sys.modules['docs.explanations'])} and the code differ in {names}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    PATH.write_text(reference())
