"""Random adapters for all linear layers of a transformer's blocks, in files named as peft and diffusers name them."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from loraplex.layout import Layout, TargetModule


def block_modules(layout: Layout) -> list[TargetModule]:
    """The linear layers inside the blocks: what peft's "all-linear" recipes train; 494 in FLUX.1-dev."""
    return [
        module
        for module in layout.modules
        if module.component == "transformer" and "transformer_blocks." in module.name and module.kind == "linear"
    ]


def write_adapter(path: Path, layout: Layout, rank: int, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write an adapter of `rank`; returns the tensors of its first module."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in block_modules(layout):
        for letter, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
            values = torch.empty(shape, dtype=dtype).uniform_(-0.05, 0.05, generator=generator)
            tensors[f"{module.path}.lora_{letter}.weight"] = values
    save_file(tensors, path, metadata={"format": "pt"})
    first = block_modules(layout)[0].path
    return {letter: tensors[f"{first}.lora_{letter}.weight"] for letter in "AB"}
