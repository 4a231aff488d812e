"""torch.compile on the denoisers, in one place; the models do not know."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from executor.errors import UnsupportedModel
from executor.pipeline import BasePipeline


def compiled_denoisers(base: BasePipeline, mode: str) -> dict[str, Callable[..., Any]]:
    """The denoisers' forwards with torch.compile on all ("whole"), on each repeated block ("regional"), or "off".

    Shapes are static and graph breaks are errors.
    """
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 256  # one graph per kind of block, batch size and resolution
    if mode == "whole":
        return {name: torch.compile(one, fullgraph=True, dynamic=False) for name, one in base.forwards.items()}
    if mode == "regional":
        for denoiser in base.denoisers.values():
            for block in _repeated_blocks(denoiser):
                block.compile(fullgraph=True, dynamic=False)
    return dict(base.forwards)


def _repeated_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks that diffusers names, or else the members of the model's own lists. Raises UnsupportedModel."""
    names = getattr(denoiser, "_repeated_blocks", None)
    if names:
        blocks = [module for module in denoiser.modules() if type(module).__name__ in names]
    else:
        lists = [child for child in denoiser.children() if isinstance(child, nn.ModuleList)]
        blocks = [block for one in lists for block in one]
    if not blocks:
        raise UnsupportedModel(f"{type(denoiser).__name__} has no repeated blocks: set compile to whole or off.")
    return blocks


def compiled_graphs() -> int:
    """How many graphs dynamo has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
