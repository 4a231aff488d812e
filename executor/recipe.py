"""What can be done to a loaded base model before the rank rows are attached: quantised layers, attention kernels.

Every option says at start why it cannot be had. Quantised weights stay inside of their `nn.Linear`, so the layout is
the same with and without, and the LoRA branch beside them computes in the dtype of the rows.
"""

import importlib
from collections.abc import Iterable
from typing import Any

import structlog
import torch
from torch import nn

from executor.config import ExecutorSettings
from executor.errors import UnsupportedOption

_log = structlog.stdlib.get_logger("loraplex.executor")

# Our names -> torchao's configurations; the first two multiply in the small dtype, the others only store it.
_CONFIGS = {
    "fp8": "Float8DynamicActivationFloat8WeightConfig",
    "int8": "Int8DynamicActivationInt8WeightConfig",
    "fp8_weights": "Float8WeightOnlyConfig",
    "int8_weights": "Int8WeightOnlyConfig",
}
# Tensor cores take tiles of 16; smaller layers cost nothing anyway.
_TILE = 16
_FP8_CAPABILITY = (8, 9)


def apply_recipe(
    pipeline: Any, denoisers: Iterable[nn.Module], settings: ExecutorSettings, device: torch.device
) -> None:
    """Change the components of `pipeline` in place as the settings say. Raises UnsupportedOption."""
    for denoiser in denoisers:
        if settings.attention_backend:
            _set_attention(denoiser, settings.attention_backend)
        if settings.quantization != "none":
            _quantize(denoiser, "quantization", settings.quantization, device)
    if settings.vae_tiling:
        if not hasattr(pipeline.vae, "enable_tiling"):
            raise UnsupportedOption(f"vae_tiling: {type(pipeline.vae).__name__} cannot be tiled.")
        pipeline.vae.enable_tiling()
    if settings.text_encoder_quantization != "none":
        for name, component in pipeline.components.items():
            if name.startswith("text_encoder") and component is not None:
                _quantize(component, "text_encoder_quantization", settings.text_encoder_quantization, device)


def _set_attention(denoiser: Any, backend: str) -> None:
    if not hasattr(denoiser, "set_attention_backend"):
        raise UnsupportedOption(f"attention_backend: {type(denoiser).__name__} has one only.")
    try:
        denoiser.set_attention_backend(backend)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedOption(f"attention_backend: {error}") from error


def _quantize(model: nn.Module, option: str, name: str, device: torch.device) -> None:
    if name == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY):
        raise UnsupportedOption(f"{option}: fp8 needs a CUDA GPU of capability 8.9 or above; this is {device}.")
    try:
        torchao = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise UnsupportedOption(f"{option}: {name} needs torchao: pip install 'loraplex[quantization]'.") from error
    quantized: list[str] = []

    def wanted(module: nn.Module, path: str) -> bool:
        if type(module) is not nn.Linear or module.in_features % _TILE or module.out_features % _TILE:
            return False
        quantized.append(path)
        return True

    torchao.quantize_(model, getattr(torchao, _CONFIGS[name])(), wanted)
    if not quantized:
        raise UnsupportedOption(f"{option}: {type(model).__name__} has no linear layer that {name} can be used for.")
    _log.info("quantised", model=type(model).__name__, to=name, layers=len(quantized))
