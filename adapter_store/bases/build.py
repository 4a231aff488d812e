"""Configs of a pipeline's components -> the layout that an executor would read off the loaded pipeline.

The components are built on torch's meta device: no weights, no memory. Needs the extra `bases`; only the command line
imports this, never a store that serves.
"""

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
import transformers

from loraplex.layout import Layout, TargetModule
from loraplex.targets import adaptable_components, target_modules

Config = Mapping[str, Any]


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
    except (AttributeError, KeyError, TypeError) as error:
        what = config.get("_class_name") or config.get("architectures") or "a config without a class"
        raise ValueError(f"{what} cannot be built with the installed diffusers and transformers: {error}") from error


def _model(config: Config) -> torch.nn.Module:
    if "_class_name" in config:
        denoiser: torch.nn.Module = getattr(diffusers, config["_class_name"]).from_config(dict(config))
        return denoiser
    model_class = getattr(transformers, config["architectures"][0])
    fields = {key: value for key, value in config.items() if key != "architectures"}
    encoder: torch.nn.Module = model_class(model_class.config_class(**fields))
    return encoder
