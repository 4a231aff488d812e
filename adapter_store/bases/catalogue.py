"""From what a user writes for a base model to its layout."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from adapter_store.bases.outline import read_outline
from loraplex.errors import AdapterNotFound, InvalidRequest
from loraplex.layout import DTYPE_SIZES, Layout

_HERE = Path(__file__).parent
OUTLINES = _HERE / "outlines"
_INDEX = "model_index.json"

# (repository) -> a local folder with its model_index.json and the config.json of its components
FetchConfigs = Callable[[str], Path]


@cache
def known_bases() -> Mapping[str, Mapping[str, Any]]:
    """The well-known bases by name: for each what it is `about`, its `family`, its names on the `hub`, and the configs
    of its `components`."""
    bases: dict[str, dict[str, Any]] = json.loads((_HERE / "bases.json").read_text())
    return bases


@cache
def candidates() -> Mapping[str, Layout]:
    """The layouts of all well-known bases by name, to tell which one a file was made for.

    Needs no torch; the first call takes about 50 ms, and the layouts stay in memory.
    """
    return {name: known_layout(name, name, "BF16") for name in known_bases()}


def find_base(text: str, dtype: str, fetch_configs: FetchConfigs) -> Layout:
    """The layout of a well-known base, of a local diffusers folder, or of a repository on the hub.

    A hub name of a well-known base is that base, with that name as the hub spells it; upper and lower case do not
    matter. Raises InvalidRequest, listing the well-known ones; ImportError where torch and diffusers are needed and
    not installed; what `fetch_configs` raises.
    """
    if dtype not in DTYPE_SIZES:
        remedy = f"Use one of {', '.join(DTYPE_SIZES)}."
        raise InvalidRequest(f"{dtype!r} is no dtype of rank rows.", field="dtype", remedy=remedy)
    known = _known(text)
    if known is not None:
        return known_layout(*known, dtype)
    if (Path(text) / _INDEX).is_file():
        return _of_folder(text, Path(text), dtype)
    if text.count("/") == 1 and not Path(text).exists():
        return _of_repository(text, dtype, fetch_configs)
    raise _unusable(f"{text!r} is no base model that is known here, and no folder with a {_INDEX}.")


@cache
def known_layout(name: str, base_model: str, dtype: str) -> Layout:
    """The layout of a well-known base under the name that an operator gives it. Needs no torch."""
    base = known_bases()[name]
    modules = [
        module
        for component, outline in base["components"].items()
        for module in read_outline((OUTLINES / f"{outline}.txt").read_text(), component)
    ]
    return Layout(base_model, base["family"], dtype, tuple(modules))


def component_configs() -> Mapping[str, Mapping[str, Any]]:
    """The configs that the outlines are made from, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((_HERE / "components").glob("*.json"))}


def _known(text: str) -> tuple[str, str] | None:
    """The name of a well-known base, and the spelling of `text` that its layout is known by."""
    for name, base in known_bases().items():
        for spelling in (name, *base["hub"]):
            if text.lower() == spelling.lower():
                return name, spelling
    return None


def _of_repository(text: str, dtype: str, fetch_configs: FetchConfigs) -> Layout:
    try:
        folder = fetch_configs(text)
    except AdapterNotFound as error:
        raise _unusable(error.message, error.remedy) from error
    return _of_folder(text, folder, dtype)


def _of_folder(text: str, folder: Path, dtype: str) -> Layout:
    from adapter_store.bases.build import build_folder  # torch and diffusers take seconds, and may not be installed

    try:
        return build_folder(text, folder, dtype)
    except ValueError as error:
        raise _unusable(f"The layout of {text!r} cannot be built: {error}.") from error


def _unusable(message: str, remedy: str = "") -> InvalidRequest:
    others = f"Use a diffusers folder, a repository on the hub, or one of {', '.join(known_bases())}."
    return InvalidRequest(message, field="base", remedy=f"{remedy} {others}".lstrip())
