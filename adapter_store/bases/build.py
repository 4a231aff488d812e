"""Configs of a pipeline's components -> the layout that an executor would read off the loaded pipeline.

The components are built on torch's meta device: no weights, no memory. Needs the extra `bases`; only the command line
imports this, never a store that serves.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from loraplex.layout import Layout, TargetModule
from loraplex.targets import adaptable_components, target_modules

Config = Mapping[str, Any]

INDEX = "model_index.json"


def build_folder(name: str, folder: Path, dtype: str) -> Layout:
    """The layout of a diffusers folder, from its model_index.json and the config.json of its adaptable components.

    The classes are those that model_index.json names, as for diffusers itself. Raises ValueError for a folder that
    lacks one of these files, or whose configs no installed class understands.
    """
    index = _read_json(folder, INDEX)
    # A component that the pipeline does without is [null, null].
    parts = {name: entry for name, entry in index.items() if name.isidentifier() and _is_part(entry)}
    family = str(index.get("_class_name", ""))
    chosen = adaptable_components(family, parts)
    if not chosen:
        raise ValueError(f"{INDEX} names no component that adapters modify")
    configs = {component: _component_config(folder, component, *parts[component]) for component in chosen}
    return build_layout(name, family, configs, dtype)


def build_layout(name: str, family: str, configs: Mapping[str, Config], dtype: str) -> Layout:
    """The layout of a pipeline of class `family`, from the config.json of every component.

    Raises ValueError for configs that no installed class understands.
    """
    modules = [
        module
        for component in adaptable_components(family, configs)
        for module in build_component(component, configs[component])
    ]
    return Layout(name, family, dtype, tuple(modules))


def build_component(component: str, config: Config) -> list[TargetModule]:
    """The target modules of one component. Raises ValueError as `build_layout` does."""
    return list(target_modules(component, build_model(config)))


def build_model(config: Config) -> torch.nn.Module:
    """The model of a config, on the meta device. Raises ValueError as `build_layout` does."""
    try:
        with torch.device("meta"):
            return _model(config)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = config.get("_class_name") or config.get("architectures") or "a config without a class"
        raise ValueError(f"{what} cannot be built with the installed diffusers and transformers: {error}") from error


def _model(config: Config) -> torch.nn.Module:
    if "_class_name" in config:
        denoiser: torch.nn.Module = _class(diffusers, config["_class_name"], diffusers.ModelMixin).from_config(
            dict(config)
        )
        return denoiser
    model_class = _class(transformers, config["architectures"][0], transformers.PreTrainedModel)
    config_class = model_class.config_class
    # The config of a whole CLIP holds that of its text tower, under a name that the class knows.
    fields = config.get(config_class.base_config_key or "", config)
    encoder: torch.nn.Module = model_class(config_class(**{k: v for k, v in fields.items() if k != "architectures"}))
    return encoder


def _class(library: Any, name: str, base: type) -> Any:
    found = getattr(library, name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{library.__name__} {library.__version__} has no model class {name!r}")
    return found


def _component_config(folder: Path, component: str, library: str, class_name: str) -> Config:
    fields = _read_json(folder, f"{component}/config.json")
    own = {key: value for key, value in fields.items() if key not in ("_class_name", "architectures")}
    if library == "diffusers":
        return {**own, "_class_name": class_name}
    if library == "transformers":
        return {**own, "architectures": [class_name]}
    raise ValueError(f"{component} is of the library {library!r}; diffusers and transformers are read")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        fields = json.loads((folder / name).read_text())
    except FileNotFoundError as error:
        raise ValueError(f"there is no {name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{name} is no JSON object")
    return fields


def _is_part(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(one, str) for one in entry)
