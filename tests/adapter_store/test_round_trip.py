"""From a trainer's file to packed rows, back to an ordinary file, and into diffusers: the same model comes out.

The files are written by peft and diffusers themselves, for tiny models of every family.
"""

from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from adapter_store import pack
from adapter_store.unpack import unpack
from loraplex.layout import Layout
from loraplex.targets import read_layout, target_layers
from tests.adapter_store.dialects import bases
from tests.adapter_store.samples import Float64, assert_equal, pack_file

pytestmark = pytest.mark.slow

Build = Callable[[], nn.Module]


def hunyuan_video() -> nn.Module:
    """HunyuanVideo, narrow."""
    return diffusers.HunyuanVideoTransformer3DModel(
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        attention_head_dim=12,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 6),
    )


FAMILIES: dict[str, tuple[str, str, Build]] = {
    "sd1": ("StableDiffusionPipeline", "unet", bases.unet),
    "sd2": ("StableDiffusionPipeline", "unet", lambda: bases.unet(use_linear_projection=True)),
    "sdxl": ("StableDiffusionXLPipeline", "unet", bases.sdxl_unet),
    "sd3": ("StableDiffusion3Pipeline", "transformer", bases.sd3),
    "flux": ("FluxPipeline", "transformer", bases.small_flux),
    "flux2": ("Flux2Pipeline", "transformer", bases.flux2),
    "qwen-image": ("QwenImagePipeline", "transformer", bases.qwen_image),
    "z-image": ("ZImagePipeline", "transformer", bases.z_image),
    "wan": ("WanPipeline", "transformer", bases.wan),
    "hunyuan-video": ("HunyuanVideoPipeline", "transformer", hunyuan_video),
    "ltx": ("LTXPipeline", "transformer", bases.ltx),
}


def built(build: Build) -> nn.Module:
    """The same base weights every time."""
    torch.manual_seed(0)
    return build().eval().requires_grad_(False)


def trained(model: nn.Module, ranks: tuple[int, int]) -> LoraConfig:
    """Give every target layer an adapter of peft's with random numbers; every third has the second rank."""
    names = [name for name, _ in target_layers(model)]
    config = LoraConfig(
        r=ranks[0],
        lora_alpha=2 * ranks[0],
        target_modules=names,
        rank_pattern={f"^{name}$": ranks[1] for name in names[::3]},
        alpha_pattern={f"^{name}$": 1 for name in names[::3]},
    )
    model.add_adapter(config)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return config


def deltas(model: nn.Module) -> dict[str, Float64]:
    """What peft adds to every layer, [out, in * kernel]."""
    adapted = [(name, one) for name, one in model.named_modules() if hasattr(one, "get_delta_weight") and one.r]
    return {name: one.get_delta_weight(next(iter(one.r))).detach().double().flatten(1).numpy() for name, one in adapted}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_diffusers_is_the_same_model_after_pack_and_unpack(tmp_path: Path, family: str):
    pipeline, component, build = FAMILIES[family]
    model = built(build)
    layout: Layout = read_layout({component: model}, f"tiny/{family}", pipeline, "F32")
    config = trained(model, (3, 2))
    getattr(diffusers, pipeline).save_lora_weights(
        tmp_path,
        **{
            f"{component}_lora_layers": get_peft_model_state_dict(model),
            f"{component}_lora_adapter_metadata": config.to_dict(),
        },
    )
    packed = tmp_path / "packed.safetensors"
    rows = pack_file(tmp_path / "pytorch_lora_weights.safetensors", layout)
    assert len(rows.module_indexes) == len(layout.modules)
    rows.write(pack.Origin("0" * 64), packed)
    unpack(packed, tmp_path / "unpacked.safetensors")
    again = built(build)
    again.load_lora_adapter(load_file(tmp_path / "unpacked.safetensors"), prefix=component)  # type: ignore[operator]
    assert_equal(deltas(again), deltas(model))
