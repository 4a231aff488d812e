"""The base models of the benchmarks: tiny-flux as it is; the topologies of FLUX.1-dev and SDXL, without weights."""

import json
from collections.abc import Callable
from typing import Any

import torch
import transformers
from diffusers import (
    DiffusionPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.utils import logging as diffusers_logging
from torch import nn

from deploy.local import ROOT, TINY_FLUX
from loraplex.layout import Layout
from loraplex.targets import read_layout

FAMILY = "FluxPipeline"
# transformer/config.json of black-forest-labs/FLUX.1-dev.
FLUX_DEV = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}


def tiny_flux(device: torch.device, dtype: torch.dtype) -> Any:
    """The embedded base model, whole."""
    diffusers_logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()
    pipeline = DiffusionPipeline.from_pretrained(TINY_FLUX, dtype=dtype, use_safetensors=True).to(device)
    pipeline.set_progress_bar_config(disable=True)
    for name in ("transformer", "text_encoder", "text_encoder_2", "vae"):
        getattr(pipeline, name).eval().requires_grad_(False)
    return pipeline


def full_flux(device: torch.device, dtype: torch.dtype) -> Any:
    """A pipeline with FLUX.1-dev's transformer alone. Its weights cannot be used: 24 GB that do not exist."""
    with torch.device("meta"):
        transformer: Any = FluxTransformer2DModel(**FLUX_DEV)
    return pipeline_of(_emptied(transformer, device, dtype))


def full_sdxl(device: torch.device, dtype: torch.dtype) -> Any:
    """A pipeline with SDXL's UNet alone. Its weights cannot be used: 5 GB that do not exist."""
    config = json.loads((ROOT / "adapter_store/bases/components/sdxl_unet.json").read_text())
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel.from_config(config)
    others = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return StableDiffusionXLPipeline(**dict.fromkeys(others), unet=_emptied(unet, device, dtype))


def flux_blocks(device: torch.device, dtype: torch.dtype) -> Any:
    """One double and one single block at FLUX.1-dev's width, with random weights."""
    config = {**FLUX_DEV, "num_layers": 1, "num_single_layers": 1}
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(**config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.uniform_(-0.02, 0.02)
    return model


def pipeline_of(transformer: Any) -> Any:
    """A pipeline with this transformer and nothing else: enough to load adapters and to compile."""
    others = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return FluxPipeline(**dict.fromkeys(others), transformer=transformer)


def layout_of(pipeline: Any, name: str, dtype: str) -> Layout:
    """The layout that an executor would read off this pipeline."""
    names = ("transformer", "unet", "text_encoder", "text_encoder_2")
    components = {one: getattr(pipeline, one) for one in names if getattr(pipeline, one, None) is not None}
    return read_layout(components, name, type(pipeline).__name__, dtype)


def _emptied(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model from the meta device with parameters that have their shapes and one number each."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, _without_memory(parameter.shape, device, dtype))
    return model.eval()


def _without_memory(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    one = torch.zeros(1, device=device, dtype=dtype)
    return nn.Parameter(one.expand(shape) if len(shape) else one[0], requires_grad=False)


MODELS: dict[str, Callable[[torch.device, torch.dtype], Any]] = {
    "tiny-flux": tiny_flux,
    "FLUX.1-dev": full_flux,
    "SDXL's UNet": full_sdxl,
}
