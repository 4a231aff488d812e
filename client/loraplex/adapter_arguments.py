"""How an adapter is written on the command line: REF[:STRENGTH] [NAME=VALUE ...]."""

import math
import re
from collections.abc import Callable
from typing import Any

from loraplex.options import AdapterSelection
from loraplex.pack_options import PackOptions

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SETTING = re.compile(r"(?P<rest>.*\S)\s+(?P<name>[a-z_-]+)=(?P<value>\S*)\s*")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_OF_SELECTION: dict[str, Callable[[str], Any]] = {"start": float, "end": float, "components": _names}
_OF_PACKING: dict[str, Callable[[str], Any]] = {
    "denoiser": str,
    "waived": _names,
    "max_rank": int,
    "max_error": float,
}


def parse_adapter(text: str) -> AdapterSelection:
    """`ref[:strength] [name=value ...]`, as in `org/name@rev:file.safetensors:0.8 start=0.5 components=transformer`.

    A reference may hold colons itself: the last part is the strength iff it is a finite number. Settings follow it
    after spaces; the hub has no spaces in its names. Raises ValueError for a setting that is not known or wrong.
    """
    settings: dict[str, str] = {}
    while match := _SETTING.fullmatch(text):
        name = match["name"].replace("-", "_")
        if name in settings:
            raise ValueError(f"{name} is set twice")
        settings[name], text = match["value"], match["rest"]
    unknown = settings.keys() - _OF_SELECTION.keys() - _OF_PACKING.keys()
    if unknown:
        known = ", ".join([*_OF_SELECTION, *_OF_PACKING])
        raise ValueError(f"{', '.join(sorted(unknown))} is none of {known}")
    ref, strength = _split(text)
    options = PackOptions(**_read(settings, _OF_PACKING))
    return AdapterSelection(ref, strength, options=options, **_read(settings, _OF_SELECTION))


def _split(text: str) -> tuple[str, float]:
    ref, _, last = text.rpartition(":")
    if ref and _NUMBER.fullmatch(last) and math.isfinite(float(last)):
        return ref, float(last)
    return text, 1.0


def _read(settings: dict[str, str], readers: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    values = {}
    for name, read in readers.items():
        if name in settings:
            try:
                values[name] = read(settings[name])
            except ValueError as error:
                raise ValueError(f"{name} cannot be {settings[name]!r}") from error
    return values
