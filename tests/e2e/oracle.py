"""What the services must agree with, computed without any code of theirs.

- `Reference`: diffusers and PEFT, loaded fresh, eager.
- `dense_deltas`: strength * (alpha / r) * B @ A in fp64 for every module, read straight from the file.
"""

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.e2e.pair import BASE, MAX_SEQUENCE_LENGTH

# kohya's names of a Flux block and the diffusers modules that their rows belong to, in order.
_DOUBLE = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn_proj": ("attn.to_out.0",),
    "txt_attn_proj": ("attn.to_add_out",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
    "img_mod_lin": ("norm1.linear",),
    "txt_mod_lin": ("norm1_context.linear",),
}
_SINGLE = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation_lin": ("norm.linear",),
}
_BLOCKS = {"double_blocks": ("transformer_blocks", _DOUBLE), "single_blocks": ("single_transformer_blocks", _SINGLE)}

Strengths = Mapping[Path, float]


class Reference:
    """A freshly loaded pipeline with PEFT adapters, its denoiser's outputs recorded."""

    def __init__(self, strengths: Strengths) -> None:
        self.pipeline = FluxPipeline.from_pretrained(BASE, dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        for position, file in enumerate(strengths):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT warns of every second adapter
                self.pipeline.load_lora_weights(_loadable(file, self.pipeline.transformer), adapter_name=f"a{position}")
        if strengths:
            names = [f"a{position}" for position in range(len(strengths))]
            self.pipeline.set_adapters(names, [float(strength) for strength in strengths.values()])
        self.outputs: list[torch.Tensor] = []
        self.pipeline.transformer.register_forward_hook(lambda *call: self.outputs.append(call[-1][0]))

    def generate(self, prompt: str, seed: int, steps: int, **more: Any) -> Image.Image:
        """One image; `outputs` gets what the denoiser gave."""
        self.outputs.clear()
        return self.pipeline(
            prompt,
            width=64,
            height=64,
            num_inference_steps=steps,
            guidance_scale=3.5,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            generator=torch.Generator().manual_seed(seed),
            **more,
        ).images[0]


def merged_denoiser(strengths: Strengths) -> nn.Module:
    """The base's denoiser in fp64 with all deltas added to its weights."""
    denoiser = copy.deepcopy(FluxPipeline.from_pretrained(BASE, dtype=torch.float32).transformer).double()
    for file, strength in strengths.items():
        for name, delta in dense_deltas(file, denoiser).items():
            denoiser.get_submodule(name).weight.data += strength * delta
    return denoiser


def run_double(denoiser: nn.Module, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The output of a denoiser in fp64 for recorded arguments."""
    double = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    with torch.no_grad():
        return denoiser(**double)[0]


def dense_deltas(file: Path, denoiser: nn.Module) -> dict[str, torch.Tensor]:
    """(alpha / r) * B @ A in fp64 for each module of the denoiser that a peft or kohya file adapts."""
    tensors = _tensors(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
    if any(key.startswith("lora_unet_") for key in tensors):
        return _kohya(tensors, denoiser)
    return _peft(tensors, json.loads(metadata.get("lora_adapter_metadata", "{}")))


def _peft(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    deltas = {}
    for key, A in tensors.items():
        if not (key.startswith("transformer.") and key.endswith(".lora_A.weight")):
            continue
        name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        alpha = config.get("transformer.lora_alpha", len(A)) if config else len(A)
        alpha = config.get("transformer.alpha_pattern", {}).get(name, alpha)
        deltas[name] = alpha / len(A) * tensors[f"transformer.{name}.lora_B.weight"] @ A
    return deltas


def _kohya(tensors: Mapping[str, torch.Tensor], denoiser: nn.Module) -> dict[str, torch.Tensor]:
    return {name: B @ A for name, (A, B) in _kohya_pairs(tensors, denoiser).items()}


def _kohya_pairs(
    tensors: Mapping[str, torch.Tensor], denoiser: nn.Module
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B, alpha / r folded into B, of each diffusers module that a kohya file adapts."""
    pairs = {}
    for key, A in tensors.items():
        if not key.endswith(".lora_down.weight") or not key.startswith("lora_unet_"):
            continue
        stem = key.removesuffix(".lora_down.weight")
        B = tensors[f"{stem}.alpha"] / len(A) * tensors[f"{stem}.lora_up.weight"]
        group, rest = next((group, stem.split(f"{group}_", 1)[1]) for group in _BLOCKS if f"_{group}_" in stem)
        index, _, part = rest.partition("_")
        blocks, parts = _BLOCKS[group]
        names = [f"{blocks}.{index}.{module}" for module in parts[part]]
        rows = [denoiser.get_submodule(name).out_features for name in names]
        pairs.update({name: (A, cut) for name, cut in zip(names, B.split(rows), strict=True)})
    return pairs


def _loadable(file: Path, denoiser: nn.Module) -> Path | dict[str, torch.Tensor]:
    """What diffusers loads for this file: the file, unless its converter of kohya names has FLUX.1's sizes built in."""
    tensors = _tensors(file)
    if not any(key.startswith("lora_unet_single_blocks_") and "_linear1." in key for key in tensors):
        return file
    state = {}
    for name, (A, B) in _kohya_pairs(tensors, denoiser).items():
        state[f"transformer.{name}.lora_A.weight"] = A.float()
        state[f"transformer.{name}.lora_B.weight"] = B.float()
    return state


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    return {key: tensor.double() for key, tensor in load_file(file).items()}


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """|ours - reference| / |reference| in the Frobenius norm, in fp64."""
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def largest_pixel_difference(ours: Image.Image, reference: Image.Image) -> int:
    """In steps of 8-bit colour."""
    return int(np.abs(np.asarray(ours, dtype=int) - np.asarray(reference, dtype=int)).max())


def largest_relative_error(ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Over the calls of a whole generation."""
    assert len(ours) == len(reference)
    return max(relative_error(one, other) for one, other in zip(ours, reference, strict=True))
