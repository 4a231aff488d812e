"""Layouts of every family, read off diffusers' and transformers' own models on the meta device: few layers, no weights.

Widths are real where a converter of diffusers takes them for granted, and small elsewhere.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from loraplex.layout import Layout, TargetModule

_CLIP = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 40}
_T5 = {"d_model": 40, "d_kv": 20, "num_heads": 2, "d_ff": 64, "num_layers": 2, "vocab_size": 40}
_LLM = {
    "hidden_size": 28,
    "intermediate_size": 56,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "head_dim": 14,
}
_UNET = {"norm_num_groups": 4, "attention_head_dim": 8, "layers_per_block": 2}


def clip(width: int = 24) -> nn.Module:
    """CLIP-L as SD and Flux have it."""
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(**_CLIP | {"hidden_size": width}, num_hidden_layers=2)
    )


def clip_with_projection(width: int = 24) -> nn.Module:
    """CLIP-G as SDXL has it; both of SD3."""
    config = transformers.CLIPTextConfig(**_CLIP | {"hidden_size": width}, num_hidden_layers=3, projection_dim=width)
    return transformers.CLIPTextModelWithProjection(config)


def t5() -> nn.Module:
    """T5, gated as T5 v1.1 is."""
    return transformers.T5EncoderModel(transformers.T5Config(**_T5, feed_forward_proj="gated-gelu"))


def umt5() -> nn.Module:
    """Wan's encoder."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_T5, feed_forward_proj="gated-gelu"))


def llama() -> nn.Module:
    """HunyuanVideo's first encoder."""
    return transformers.LlamaModel(transformers.LlamaConfig(**_LLM))


def qwen3() -> nn.Module:
    """Z-Image's encoder."""
    return transformers.Qwen3Model(transformers.Qwen3Config(**_LLM))


def qwen25_vl() -> nn.Module:
    """Qwen-Image's encoder: a language model beside one for images."""
    text = {name: value for name, value in _LLM.items() if name != "head_dim"} | {"eos_token_id": 1}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 28}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def mistral3() -> nn.Module:
    """FLUX.2-dev's encoder."""
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Mistral3Config(
        text_config=_LLM | {"model_type": "mistral"}, vision_config=vision | {"model_type": "pixtral", "head_dim": 8}
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def unet(**config: Any) -> nn.Module:
    """A UNet of Stable Diffusion 1.x unless told otherwise: four blocks, attention in the first three."""
    attentive = ("CrossAttnDownBlock2D",) * 3, ("CrossAttnUpBlock2D",) * 3
    defaults = {
        "block_out_channels": (8, 16, 24, 24),
        "down_block_types": (*attentive[0], "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *attentive[1]),
        "cross_attention_dim": 12,
    }
    return diffusers.UNet2DConditionModel(**_UNET | defaults | config)


def sdxl_unet(**config: Any) -> nn.Module:
    """SDXL's UNet: three blocks of depth 0, 2 and 10 (here 4), no attention in the first."""
    defaults = {
        "block_out_channels": (8, 16, 24),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 4),
        "cross_attention_dim": 20,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64,
    }
    return diffusers.UNet2DConditionModel(**_UNET | defaults | config)


def refiner_unet() -> nn.Module:
    """The refiner's UNet: four blocks, attention in the middle two, depth 4."""
    return sdxl_unet(
        block_out_channels=(8, 16, 24, 24),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=4,
    )


def sd3() -> nn.Module:
    """SD 3.5 medium: a second attention in the first block."""
    sizes = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 12, "caption_projection_dim": 24}
    return diffusers.SD3Transformer2DModel(
        **sizes, joint_attention_dim=20, pooled_projection_dim=16, dual_attention_layers=(0,), qk_norm="rms_norm"
    )


def flux(num_layers: int = 2, num_single_layers: int = 2) -> nn.Module:
    """FLUX.1-dev, with two blocks of each kind unless told otherwise."""
    return diffusers.FluxTransformer2DModel(
        num_layers=num_layers, num_single_layers=num_single_layers, guidance_embeds=True
    )


def small_flux() -> nn.Module:
    """FLUX.1-dev, narrow."""
    return diffusers.FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        guidance_embeds=True,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=20,
        pooled_projection_dim=24,
        in_channels=8,
        axes_dims_rope=(4, 6, 6),
    )


def flux2() -> nn.Module:
    """FLUX.2-dev, narrow."""
    return diffusers.Flux2Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=20,
        in_channels=8,
        axes_dims_rope=(4, 4, 4, 4),
    )


def qwen_image() -> nn.Module:
    """Qwen-Image, narrow."""
    return diffusers.QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=20, in_channels=8
    )


def z_image() -> nn.Module:
    """Z-Image, narrow."""
    return diffusers.ZImageTransformer2DModel(
        n_layers=2, n_refiner_layers=2, dim=32, n_heads=2, n_kv_heads=2, axes_dims=[4, 6, 6], cap_feat_dim=24
    )


def wan(**config: Any) -> nn.Module:
    """Wan 2.1, narrow; image to video with `image_dim` and `added_kv_proj_dim`."""
    return diffusers.WanTransformer3DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=40, text_dim=16, **config
    )


def wan_vace() -> nn.Module:
    """Wan 2.1 with the blocks that VACE adds, narrow."""
    return diffusers.WanVACETransformer3DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=40, text_dim=16, vace_layers=[0]
    )


def hunyuan_video() -> nn.Module:
    """HunyuanVideo with two blocks of each kind."""
    return diffusers.HunyuanVideoTransformer3DModel(num_layers=2, num_single_layers=2)


def ltx() -> nn.Module:
    """LTX-Video, narrow."""
    return diffusers.LTXVideoTransformer3DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24, caption_channels=16
    )


def ltx2() -> nn.Module:
    """LTX-2 with the modules of 2.3."""
    return diffusers.LTX2VideoTransformer3DModel(num_layers=1, cross_attn_mod=True, audio_cross_attn_mod=True)


Parts = dict[str, Callable[[], nn.Module]]

# name -> pipeline and its adaptable models
BASES: dict[str, tuple[str, Parts]] = {
    "sd1": ("StableDiffusionPipeline", {"unet": unet, "text_encoder": clip}),
    "sd2": ("StableDiffusionImg2ImgPipeline", {"unet": lambda: unet(use_linear_projection=True), "text_encoder": clip}),
    "sdxl": (
        "StableDiffusionXLPipeline",
        {"unet": sdxl_unet, "text_encoder": clip, "text_encoder_2": lambda: clip_with_projection(32)},
    ),
    "sdxl-refiner": (
        "StableDiffusionXLImg2ImgPipeline",
        {"unet": refiner_unet, "text_encoder_2": lambda: clip_with_projection(32)},
    ),
    "sd3": (
        "StableDiffusion3Pipeline",
        {
            "transformer": sd3,
            "text_encoder": clip_with_projection,
            "text_encoder_2": lambda: clip_with_projection(32),
            "text_encoder_3": t5,
        },
    ),
    "flux": ("FluxPipeline", {"transformer": small_flux, "text_encoder": clip, "text_encoder_2": t5}),
    "flux-dev": ("FluxPipeline", {"transformer": lambda: flux(19, 38)}),
    "flux-kontext": ("FluxKontextPipeline", {"transformer": flux}),
    "flux2": ("Flux2Pipeline", {"transformer": flux2, "text_encoder": mistral3}),
    "flux2-klein": ("Flux2KleinPipeline", {"transformer": flux2, "text_encoder": qwen3}),
    "qwen-image": ("QwenImagePipeline", {"transformer": qwen_image, "text_encoder": qwen25_vl}),
    "z-image": ("ZImagePipeline", {"transformer": z_image, "text_encoder": qwen3}),
    "wan": ("WanPipeline", {"transformer": wan, "text_encoder": umt5}),
    "wan-i2v": ("WanImageToVideoPipeline", {"transformer": lambda: wan(image_dim=20, added_kv_proj_dim=24)}),
    "wan-vace": ("WanVACEPipeline", {"transformer": wan_vace}),
    "wan2.2": ("WanPipeline", {"transformer": wan, "transformer_2": wan, "text_encoder": umt5}),
    "hunyuan-video": (
        "HunyuanVideoPipeline",
        {"transformer": hunyuan_video, "text_encoder": llama, "text_encoder_2": clip},
    ),
    "ltx": ("LTXPipeline", {"transformer": ltx, "text_encoder": t5}),
    "ltx2": ("LTX2Pipeline", {"transformer": ltx2}),
}
PIPELINES = (
    *("StableDiffusionInpaintPipeline", "StableDiffusionXLInpaintPipeline", "StableDiffusion3Img2ImgPipeline"),
    *("FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxFillPipeline", "Flux2KleinInpaintPipeline"),
    *("QwenImageEditPipeline", "QwenImageEditPlusPipeline", "ZImageImg2ImgPipeline", "WanVideoToVideoPipeline"),
    *("HunyuanVideoImageToVideoPipeline", "HunyuanVideoFramepackPipeline", "LTXImageToVideoPipeline"),
)


@cache
def base(name: str) -> Layout:
    """The layout of a base of BASES."""
    pipeline, parts = BASES[name]
    assert hasattr(diffusers, pipeline)
    return read_layout(f"tiny/{name}", pipeline, parts)


def denoiser_modules(name: str) -> list[str]:
    """The names of the modules of a base's (first) denoiser."""
    modules = base(name).modules
    return [module.name for module in modules if module.component == modules[0].component]


def read_layout(base_model: str, pipeline: str, parts: Parts) -> Layout:
    """The layout of models: every linear layer and every convolution that is not grouped."""
    modules: list[TargetModule] = []
    for component, build in parts.items():
        with torch.device("meta"):
            model = build()
        modules += [target for path, module in model.named_modules() if (target := _target(component, path, module))]
    return Layout(base_model, pipeline, "F32", tuple(modules))


def _target(component: str, path: str, module: nn.Module) -> TargetModule | None:
    if isinstance(module, nn.Linear):
        return TargetModule(component, path, "linear", module.in_features, module.out_features)
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        height, width = module.kernel_size
        return TargetModule(component, path, "conv2d", module.in_channels, module.out_channels, (height, width))
    return None
