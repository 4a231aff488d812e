"""Random adapters for the layers of a denoiser's blocks, in files named as peft and diffusers or as kohya name them."""

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


def write_kohya(path: Path, layout: Layout, rank: int, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write an adapter of all layers of a UNet's blocks, convolutions too, alpha = rank; returns as `write_adapter`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    modules = [module for module in layout.modules if module.component == "unet" and "_block" in module.name]
    for module in modules:
        stem = f"lora_unet_{module.name.replace('.', '_')}"
        kernel, one = (module.kernel, (1, 1)) if module.kind == "conv2d" else ((), ())
        for end, shape in (
            ("lora_down", (rank, module.in_features, *kernel)),
            ("lora_up", (module.out_features, rank, *one)),
        ):
            values = torch.empty(shape, dtype=dtype).uniform_(-0.05, 0.05, generator=generator)
            tensors[f"{stem}.{end}.weight"] = values
        tensors[f"{stem}.alpha"] = torch.tensor(float(rank), dtype=dtype)
    save_file(tensors, path, metadata={"ss_network_module": "networks.lora", "ss_network_dim": str(rank)})
    first = f"lora_unet_{modules[0].name.replace('.', '_')}"
    return {"A": tensors[f"{first}.lora_down.weight"], "B": tensors[f"{first}.lora_up.weight"]}
