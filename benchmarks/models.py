"""The base models of the benchmarks: tiny-flux as it is, and FLUX.1-dev's topology with weights that take no memory."""

from typing import Any

import torch
import transformers
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel
from diffusers.utils import logging as diffusers_logging
from torch import nn

from deploy.local import TINY_FLUX
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
    for module in transformer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, _without_memory(parameter.shape, device, dtype))
    return pipeline_of(transformer.eval())


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
    names = ("transformer", "text_encoder", "text_encoder_2")
    components = {name: getattr(pipeline, name) for name in names if getattr(pipeline, name) is not None}
    return read_layout(components, name, FAMILY, dtype)


def _without_memory(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    one = torch.zeros(1, device=device, dtype=dtype)
    return nn.Parameter(one.expand(shape) if len(shape) else one[0], requires_grad=False)
