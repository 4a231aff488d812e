"""What the store builds from configs is what an executor reads off the loaded model: the digest is the contract."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import nn

from adapter_store.bases import find_base
from executor.config import ExecutorSettings
from executor.service import load_model
from loraplex.layout import Layout
from loraplex.targets import adaptable_components, read_layout

BASE = Path(__file__).parents[2] / "models/tiny_flux/base"

UNET = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": (2, 4),
    "cross_attention_dim": 32,
}
CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 40}
T5 = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 48, "num_layers": 2, "vocab_size": 40}
SD3 = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "caption_projection_dim": 32,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 64,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
    "sample_size": 8,
    "pos_embed_max_size": 8,
}
WAN = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "ffn_dim": 24}


def unet(**more: Any) -> nn.Module:
    return diffusers.UNet2DConditionModel(**UNET, **more)


def clip(projects: bool = False) -> nn.Module:
    config = transformers.CLIPTextConfig(**CLIP, projection_dim=32)
    return transformers.CLIPTextModelWithProjection(config) if projects else transformers.CLIPTextModel(config)


def t5() -> nn.Module:
    return transformers.T5EncoderModel(transformers.T5Config(**T5, feed_forward_proj="gated-gelu"))


def sd() -> DiffusionPipeline:
    return pipeline(diffusers.StableDiffusionPipeline, unet=unet(), text_encoder=clip(), requires_safety_checker=False)


def sd_2() -> DiffusionPipeline:
    return pipeline(
        diffusers.StableDiffusionPipeline,
        unet=unet(use_linear_projection=True),
        text_encoder=clip(),
        requires_safety_checker=False,
    )


def sdxl() -> DiffusionPipeline:
    added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    denoiser = unet(
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        **added,
    )
    return pipeline(
        diffusers.StableDiffusionXLPipeline, unet=denoiser, text_encoder=clip(), text_encoder_2=clip(projects=True)
    )


def sdxl_refiner() -> DiffusionPipeline:
    return pipeline(diffusers.StableDiffusionXLImg2ImgPipeline, unet=unet(), text_encoder_2=clip(projects=True))


def sd3() -> DiffusionPipeline:
    return pipeline(
        diffusers.StableDiffusion3Pipeline,
        transformer=diffusers.SD3Transformer2DModel(**SD3),
        text_encoder=clip(projects=True),
        text_encoder_2=clip(projects=True),
        text_encoder_3=t5(),
    )


def wan_2_2() -> DiffusionPipeline:
    both = {name: diffusers.WanTransformer3DModel(**WAN) for name in ("transformer", "transformer_2")}
    encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(**T5, feed_forward_proj="gated-gelu"))
    return pipeline(diffusers.WanPipeline, **both, text_encoder=encoder)


def pipeline(family: Any, **components: Any) -> DiffusionPipeline:
    """A pipeline with these components and None for all others."""
    others = dict.fromkeys(family._get_signature_keys(family)[0])
    loaded: DiffusionPipeline = family(**{**others, **components})
    return loaded


def layout_of_loaded(folder: Path) -> Layout:
    """What an executor would register: loaded and read as executor.pipeline does."""
    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    loaded = DiffusionPipeline.from_pretrained(str(folder), dtype=torch.float32, use_safetensors=True, **absent)
    models = {name: one for name, one in loaded.components.items() if isinstance(one, nn.Module)}
    family = type(loaded).__name__
    chosen = {name: models[name] for name in adaptable_components(family, models)}
    return read_layout(chosen, str(folder), family, "F32")


def test_the_layout_of_a_folder_is_the_one_that_an_executor_registers():
    settings = ExecutorSettings(
        base_model=str(BASE),
        resolutions=((64, 64),),
        compile="off",
        max_sequence_length=12,
        threads=1,
        batch_sizes=(1,),
    )
    model = load_model(settings)
    model.engine.close()
    assert find_base(str(BASE), "F32", lambda _: BASE) == model.layout


@pytest.mark.parametrize(
    ("make", "components"),
    [
        (sd, ["unet", "text_encoder"]),
        (sd_2, ["unet", "text_encoder"]),
        (sdxl, ["unet", "text_encoder", "text_encoder_2"]),
        (sdxl_refiner, ["unet", "text_encoder_2"]),
        (sd3, ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3"]),
        (wan_2_2, ["transformer", "transformer_2"]),
    ],
)
def test_the_layout_of_a_folder_is_that_of_the_pipeline_loaded_from_it(
    tmp_path: Path, make: Callable[[], DiffusionPipeline], components: list[str]
):
    make().save_pretrained(tmp_path)
    loaded = layout_of_loaded(tmp_path)
    assert find_base(str(tmp_path), "F32", lambda _: tmp_path) == loaded
    assert list(dict.fromkeys(module.component for module in loaded.modules)) == components
