"""Small random pipelines of the families that are served, written to a folder as from_pretrained reads them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

TOKENIZERS = Path(__file__).parents[3] / "models/tiny_flux/base"
WORDS = 70  # of the tokenizers
PROMPT_TOKENS = 12  # what the tokenizers cut at
TEXT = 32  # width of the text encoders


def _tokenizer(name: str = "tokenizer_2", length: int = PROMPT_TOKENS) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZERS / name)
    tokenizer.model_max_length = length
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def _clip(kind: Any = transformers.CLIPTextModel, width: int = TEXT) -> nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=TEXT,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=PROMPT_TOKENS,
        pad_token_id=0,
        bos_token_id=3,
        eos_token_id=1,
    )
    return kind(config)


def _t5(config: Any = transformers.T5Config, model: Any = transformers.T5EncoderModel) -> nn.Module:
    return model(
        config(
            vocab_size=WORDS,
            d_model=TEXT,
            d_kv=8,
            d_ff=2 * TEXT,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=8,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


_QWEN = {
    "vocab_size": WORDS,
    "hidden_size": TEXT,
    "intermediate_size": TEXT,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def _vae(channels: int = 4, **more: Any) -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        layers_per_block=1,
        norm_num_groups=4,
        **more,
    )


def _unet(**more: Any) -> nn.Module:
    return diffusers.UNet2DConditionModel(
        **{
            "sample_size": 16,
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": TEXT,
            "attention_head_dim": 2,
            "norm_num_groups": 8,
            **more,
        }
    )


def _flow(**more: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**more)


def sd15() -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(),
        tokenizer=_tokenizer("tokenizer"),
        unet=_unet(),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip(),
        text_encoder_2=_clip(transformers.CLIPTextModelWithProjection),
        tokenizer=_tokenizer("tokenizer"),
        tokenizer_2=_tokenizer("tokenizer"),
        unet=_unet(
            cross_attention_dim=2 * TEXT,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + TEXT,
            use_linear_projection=True,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )


def sd3() -> Any:
    clip = transformers.CLIPTextModelWithProjection
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=16,  # its inpainting pipeline asks for that
            out_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            caption_projection_dim=16,
            pooled_projection_dim=2 * TEXT,
            pos_embed_max_size=16,
        ),
        scheduler=_flow(shift=3.0),
        vae=_vae(16, shift_factor=0.06),
        text_encoder=_clip(clip, TEXT // 2),
        tokenizer=_tokenizer("tokenizer"),
        text_encoder_2=_clip(clip, TEXT // 2),
        tokenizer_2=_tokenizer("tokenizer"),
        text_encoder_3=_t5(),
        tokenizer_3=_tokenizer(),
    )


def flux(guidance_embeds: bool = True) -> Any:
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=guidance_embeds,
        ),
        scheduler=_flow(use_dynamic_shifting=guidance_embeds),
        vae=_vae(shift_factor=0.1),
        text_encoder=_clip(),
        tokenizer=_tokenizer("tokenizer"),
        text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(),
    )


def schnell() -> Any:
    return flux(guidance_embeds=False)


def flux2_klein() -> Any:
    config = transformers.Qwen3Config(**_QWEN, num_hidden_layers=28, head_dim=8)
    return diffusers.Flux2KleinPipeline(
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * TEXT,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        scheduler=_flow(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLFlux2(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=4,
        ),
        text_encoder=transformers.Qwen3ForCausalLM(config),
        tokenizer=_tokenizer(),
        is_distilled=False,
    )


def qwen_image() -> Any:
    text = {**_QWEN, "num_hidden_layers": 1, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return diffusers.QwenImagePipeline(
        transformer=diffusers.QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=_flow(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=_tokenizer(),
    )


def z_image() -> Any:
    config = transformers.Qwen3Config(**_QWEN, num_hidden_layers=2, head_dim=16)
    return diffusers.ZImagePipeline(
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=TEXT,
            axes_dims=[4, 6, 6],
            axes_lens=[128, 32, 32],
        ),
        scheduler=_flow(shift=3.0),
        vae=_vae(shift_factor=0.1),
        text_encoder=transformers.Qwen3Model(config),
        tokenizer=_tokenizer(),
    )


def _wan_transformer() -> nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )


def wan(**more: Any) -> Any:
    return diffusers.WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=_t5(transformers.UMT5Config, transformers.UMT5EncoderModel),
        transformer=_wan_transformer(),
        vae=diffusers.AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        **more,
    )


def wan22() -> Any:
    """The steps are divided between two models."""
    return wan(transformer_2=_wan_transformer(), boundary_ratio=0.9)


def wan22_ti2v() -> Any:
    """A timestep per token: layers see samples x tokens."""
    return wan(expand_timesteps=True)


FAMILIES: dict[str, Callable[[], Any]] = {
    one.__name__: one
    for one in (sd15, sdxl, sd3, flux, schnell, flux2_klein, qwen_image, z_image, wan, wan22, wan22_ti2v)
}


def save(family: str, folder: Path) -> Path:
    """Write the pipeline of `family`; the same weights every time, and none of them zero."""
    torch.manual_seed(0)
    pipeline = FAMILIES[family]()
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            for weight in component.parameters():
                if not weight.any():  # models start some layers at zero, and then nothing reaches the output
                    nn.init.normal_(weight, std=0.05)
    pipeline.save_pretrained(folder / family)
    return folder / family


def copy_of(pipeline: Any) -> Any:
    """An independent pipeline with the same weights."""
    return copy.deepcopy(pipeline)
