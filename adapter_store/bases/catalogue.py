"""From what a user writes for a base model to its layout."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from adapter_store.bases.outline import read_outline
from loraplex.errors import InvalidRequest
from loraplex.layout import Layout

_HERE = Path(__file__).parent
OUTLINES = _HERE / "outlines"
_INDEX = "model_index.json"

# (repository) -> a local folder with its model_index.json and the config.json of its components
FetchConfigs = Callable[[str], Path]


@cache
def known_bases() -> Mapping[str, Mapping[str, Any]]:
    """The well-known bases: for each its `family`, its names on the `hub` and the configs of its `components`."""
    bases: dict[str, dict[str, Any]] = json.loads((_HERE / "bases.json").read_text())
    return bases


def find_base(text: str, dtype: str, fetch_configs: FetchConfigs) -> Layout:
    """The layout of a well-known base, of a local diffusers folder, or of a repository on the hub.

    A hub name of a well-known base is that base, with that name. Raises InvalidRequest, listing the well-known ones;
    ImportError with a remedy where torch and diffusers are not installed.
    """
    name = _known_name(text)
    if name is not None:
        return known_layout(name, text, dtype)
    if (Path(text) / _INDEX).is_file():
        return _of_folder(text, Path(text), dtype)
    if text.count("/") == 1 and not Path(text).exists():
        return _of_folder(text, fetch_configs(text), dtype)
    raise InvalidRequest(
        f"{text!r} is no base model that is known here, and no folder with a {_INDEX}.",
        field="base",
        remedy=f"Use a diffusers folder, a repository on the hub, or one of {', '.join(known_bases())}.",
    )


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


@cache
def known_layouts() -> Mapping[str, Layout]:
    """The layouts of all well-known bases, by name. Takes a tenth of a second the first time."""
    return {name: known_layout(name, name, "BF16") for name in known_bases()}


def component_configs() -> Mapping[str, Mapping[str, Any]]:
    """The configs that the outlines are made from, by name."""
    return {path.stem: _config(path) for path in sorted((_HERE / "components").glob("*.json"))}


def _known_name(text: str) -> str | None:
    for name, base in known_bases().items():
        if text.lower() in (name, *(one.lower() for one in base["hub"])):
            return name
    return None


def _of_folder(text: str, folder: Path, dtype: str) -> Layout:
    index = _config(folder / _INDEX)
    # A component that the pipeline does without is [null, null].
    parts = [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]
    configs = {
        name: _config(folder / name / "config.json") for name in parts if (folder / name / "config.json").exists()
    }
    return _build(text, str(index.get("_class_name", "")), configs, dtype)


def _config(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path.name} of {path.parent.name} cannot be read: {error}", field="base") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{path.name} of {path.parent.name} is no JSON object.", field="base")
    return fields


def _build(name: str, family: str, configs: Mapping[str, Mapping[str, Any]], dtype: str) -> Layout:
    from adapter_store.bases.build import build_layout  # torch and diffusers take seconds, and may not be installed

    try:
        return build_layout(name, family, configs, dtype)
    except ValueError as error:
        raise InvalidRequest(f"The layout of {name} cannot be built: {error}", field="base") from error
