"""The tables of original names against diffusers' converters of whole base models, which are what its users run on.

A checkpoint in original names whose every row carries its name and number is converted; where a row arrives is where
the same row of B belongs. Every module of the layout must be reached: so no original name is missing or wrong.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils

from adapter_store.dialects.names import Names, Target
from adapter_store.dialects.prefixes import split_prefix
from loraplex.layout import Layout
from tests.adapter_store.dialects.bases import base, read_layout

Checkpoint = dict[str, torch.Tensor]
Converter = Callable[..., Checkpoint]


class Tagged(Checkpoint):
    """A checkpoint that also has whatever norm or position embedding is asked for: no adapter touches those."""

    def pop(self, key: str, *default: Any) -> Any:  # type: ignore[override]
        if key not in self and re.search(r"norm|ln_|pos_embed", key):
            return torch.zeros(2)
        return super().pop(key, *default)


def blocks(container: str, indexes: range, names: tuple[str, ...]) -> list[str]:
    return [f"{container}.{index}.{name}" for index in indexes for name in names]


def flux_names() -> list[str]:
    streams = [f"{s}_{n}" for s in ("img", "txt") for n in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")]
    embedders = [f"{name}_in.{layer}_layer" for name in ("time", "vector", "guidance") for layer in ("in", "out")]
    return [
        *blocks("double_blocks", range(2), tuple(streams)),
        *blocks("single_blocks", range(2), ("linear1", "linear2", "modulation.lin")),
        *embedders,
        *("img_in", "txt_in", "final_layer.linear", "final_layer.adaLN_modulation.1"),
    ]


def flux2_names() -> list[str]:
    streams = tuple(f"{s}_{n}" for s in ("img", "txt") for n in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2"))
    return [
        *blocks("double_blocks", range(2), streams),
        *blocks("single_blocks", range(2), ("linear1", "linear2")),
        *(f"{name}_in.{layer}_layer" for name in ("time", "guidance") for layer in ("in", "out")),
        *(f"{name}.lin" for name in ("double_stream_modulation_img", "double_stream_modulation_txt")),
        *("single_stream_modulation.lin", "img_in", "txt_in", "final_layer.linear", "final_layer.adaLN_modulation.1"),
    ]


def sd3_names() -> list[str]:
    common = ("attn.qkv", "adaLN_modulation.1")
    rest = ("attn.proj", "mlp.fc1", "mlp.fc2")
    return [
        *blocks("joint_blocks", range(3), tuple(f"x_block.{name}" for name in (*common, *rest))),
        *blocks("joint_blocks", range(1), ("x_block.attn2.qkv", "x_block.attn2.proj")),
        *blocks("joint_blocks", range(3), tuple(f"context_block.{name}" for name in common)),
        *blocks("joint_blocks", range(2), tuple(f"context_block.{name}" for name in rest)),
        *("x_embedder.proj", "context_embedder", "final_layer.linear", "final_layer.adaLN_modulation.1"),
        *(f"{name}_embedder.mlp.{layer}" for name in "ty" for layer in (0, 2)),
    ]


def z_image_names() -> list[str]:
    context = ("attention.qkv", "attention.out", *(f"feed_forward.w{number}" for number in (1, 2, 3)))
    modulated = (*context, "adaLN_modulation.0")
    return [
        *blocks("layers", range(2), modulated),
        *blocks("noise_refiner", range(2), modulated),
        *blocks("context_refiner", range(2), context),
        *("x_embedder", "final_layer.linear", "final_layer.adaLN_modulation.1", "cap_embedder.1"),
        *("t_embedder.mlp.0", "t_embedder.mlp.2"),
    ]


def wan_names(image: bool = False) -> list[str]:
    cross = (*"qkvo", "k_img", "v_img") if image else tuple("qkvo")
    block = (*(f"self_attn.{n}" for n in "qkvo"), *(f"cross_attn.{n}" for n in cross), "ffn.0", "ffn.2")
    return [
        *blocks("blocks", range(2), block),
        *(f"{name}_embedding.{layer}" for name in ("time", "text") for layer in (0, 2)),
        *("time_projection.1", "head.head"),
        *(("img_emb.proj.1", "img_emb.proj.3") if image else ()),
    ]


def vace_names() -> list[str]:
    block = (*(f"{a}_attn.{n}" for a in ("self", "cross") for n in "qkvo"), "ffn.0", "ffn.2", "after_proj")
    return [*wan_names(), *blocks("vace_blocks", range(1), (*block, "before_proj"))]


def hunyuan_video_names() -> list[str]:
    stream = ("attn_qkv", "attn_proj", "mlp.fc1", "mlp.fc2", "mod.linear")
    refiner = ("self_attn_qkv", "self_attn_proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
    return [
        *blocks("double_blocks", range(2), tuple(f"{s}_{name}" for s in ("img", "txt") for name in stream)),
        *blocks("single_blocks", range(2), ("linear1", "linear2", "modulation.linear")),
        *blocks("txt_in.individual_token_refiner.blocks", range(2), refiner),
        *("txt_in.t_embedder.mlp.0", "txt_in.t_embedder.mlp.2", "txt_in.input_embedder"),
        *("txt_in.c_embedder.linear_1", "txt_in.c_embedder.linear_2", "vector_in.in_layer", "vector_in.out_layer"),
        *("time_in.mlp.0", "time_in.mlp.2", "guidance_in.mlp.0", "guidance_in.mlp.2"),
        *("final_layer.linear", "final_layer.adaLN_modulation.1"),
    ]


def ltx_names() -> list[str]:
    attention = tuple(f"{a}.{n}" for a in ("attn1", "attn2") for n in ("to_q", "to_k", "to_v", "to_out.0"))
    modulation = ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")
    return [
        *blocks("transformer_blocks", range(2), (*attention, "ff.net.0.proj", "ff.net.2")),
        *(f"adaln_single.{name}" for name in modulation),
        *("patchify_proj", "proj_out", "caption_projection.linear_1", "caption_projection.linear_2"),
    ]


def ltx2_names() -> list[str]:
    layers = ("to_q", "to_k", "to_v", "to_out.0")
    kinds = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
    feed = ("ff.net.0.proj", "ff.net.2", "audio_ff.net.0.proj", "audio_ff.net.2")
    ca = ("video_scale_shift", "audio_scale_shift", "a2v_gate", "v2a_gate")
    modulations = ("adaln_single", "audio_adaln_single", *(f"av_ca_{name}_adaln_single" for name in ca))
    modulation = ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")
    return [
        *blocks("transformer_blocks", range(1), (*(f"{kind}.{n}" for kind in kinds for n in layers), *feed)),
        *(f"{name}.{layer}" for name in modulations for layer in modulation),
        *("patchify_proj", "audio_patchify_proj", "proj_out", "audio_proj_out"),
        *(f"{name}caption_projection.linear_{n}" for name in ("", "audio_") for n in (1, 2)),
    ]


def unet_names(layout: Layout, attentive: tuple[int, ...], depths: tuple[int, ...], mid_depth: int) -> list[str]:
    """The modules of the original UNet as its own constructor counts them: two layers to a block, three on the way up.

    `attentive` are the blocks with attention, `depths` the number of their transformer blocks.
    """
    last = len(depths) - 1
    outside = ["time_embed.0", "time_embed.2", "input_blocks.0.0", "out.2"]
    if any(module.name.startswith("add_embedding") for module in layout.modules):
        outside += ["label_emb.0.0", "label_emb.0.2"]
    names, n = outside, 1
    for block in range(last + 1):
        for layer in range(2):
            widens = layer == 0 and block in (1, 2)
            names += _resnet(f"input_blocks.{n}.0", skip=widens)
            names += _transformer(f"input_blocks.{n}.1", depths[block]) if block in attentive else []
            n += 1
        if block < last:
            names.append(f"input_blocks.{n}.0.op")
            n += 1
    names += [*_resnet("middle_block.0"), *_transformer("middle_block.1", mid_depth), *_resnet("middle_block.2")]
    n = 0
    for block in range(last, -1, -1):
        for layer in range(3):
            names += _resnet(f"output_blocks.{n}.0", skip=True)
            names += _transformer(f"output_blocks.{n}.1", depths[block]) if block in attentive else []
            if layer == 2 and block > 0:
                names.append(f"output_blocks.{n}.{2 if block in attentive else 1}.conv")
            n += 1
    return names


def _resnet(name: str, skip: bool = False) -> list[str]:
    layers = ("in_layers.2", "emb_layers.1", "out_layers.3", *(("skip_connection",) if skip else ()))
    return [f"{name}.{layer}" for layer in layers]


def _transformer(name: str, depth: int) -> list[str]:
    attention = tuple(f"{a}.{n}" for a in ("attn1", "attn2") for n in ("to_q", "to_k", "to_v", "to_out.0"))
    layers = (*attention, "ff.net.0.proj", "ff.net.2")
    return [f"{name}.proj_in", f"{name}.proj_out", *blocks(f"{name}.transformer_blocks", range(depth), layers)]


def convert_unet(checkpoint: Checkpoint) -> Checkpoint:
    config = {"layers_per_block": 2, "addition_embed_type": "text_time"}
    if "label_emb.0.0.weight" not in checkpoint:
        config["addition_embed_type"] = None
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in checkpoint.items()}
    return single_file_utils.convert_ldm_unet_checkpoint(prefixed, config)


def vace() -> Layout:
    import diffusers

    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 40, "text_dim": 16}
    build = lambda: diffusers.WanVACETransformer3DModel(**sizes, vace_layers=[0])  # noqa: E731
    return read_layout("tiny/vace", "WanVACEPipeline", {"transformer": build})


def cases() -> dict[str, tuple[Callable[[], Layout], Callable[[], list[str]], Converter]]:
    files = single_file_utils
    return {
        "sd1": (lambda: base("sd1"), lambda: unet_names(base("sd1"), (0, 1, 2), (1, 1, 1, 1), 1), convert_unet),
        "sd2": (lambda: base("sd2"), lambda: unet_names(base("sd2"), (0, 1, 2), (1, 1, 1, 1), 1), convert_unet),
        "sdxl": (lambda: base("sdxl"), lambda: unet_names(base("sdxl"), (1, 2), (0, 2, 4), 4), convert_unet),
        "sdxl-refiner": (
            lambda: base("sdxl-refiner"),
            lambda: unet_names(base("sdxl-refiner"), (1, 2), (0, 4, 4, 0), 4),
            convert_unet,
        ),
        "sd3": (lambda: base("sd3"), sd3_names, files.convert_sd3_transformer_checkpoint_to_diffusers),
        "flux": (lambda: base("flux-kontext"), flux_names, files.convert_flux_transformer_checkpoint_to_diffusers),
        "flux2": (lambda: base("flux2"), flux2_names, files.convert_flux2_transformer_checkpoint_to_diffusers),
        "z-image": (lambda: base("z-image"), z_image_names, files.convert_z_image_transformer_checkpoint_to_diffusers),
        "wan": (lambda: base("wan"), wan_names, files.convert_wan_transformer_to_diffusers),
        "wan-i2v": (lambda: base("wan-i2v"), lambda: wan_names(image=True), files.convert_wan_transformer_to_diffusers),
        "wan-vace": (vace, vace_names, files.convert_wan_transformer_to_diffusers),
        "hunyuan-video": (
            lambda: base("hunyuan-video"),
            hunyuan_video_names,
            files.convert_hunyuan_video_transformer_to_diffusers,
        ),
        "ltx": (lambda: base("ltx"), ltx_names, files.convert_ltx_transformer_checkpoint_to_diffusers),
    }


def rows_reached(names: list[str], targets: list[Target]) -> dict[int, torch.Tensor]:
    """For every module the tags of its rows, by our table."""
    reached: dict[int, dict[int, int]] = {}
    for number, target in enumerate(targets):
        for share in target.shares:
            rows = [row for part in share.rows for row in range(part.start, part.stop)]
            for offset, row in enumerate(rows):
                reached.setdefault(share.module, {})[share.start + offset] = tag(number, row)
    return {module: torch.tensor([rows[row] for row in range(len(rows))]) for module, rows in reached.items()}


def tag(number: int, row: int) -> int:
    return number << 20 | row


def find(names: Names, original: str, flat: bool = False) -> Target:
    stem = f"lora_unet_{original.replace('.', '_')}" if flat else f"diffusion_model.{original}"
    return names.find(split_prefix(stem), stem)


@pytest.mark.parametrize("case", cases())
def test_every_row_goes_where_diffusers_puts_the_same_row_of_the_base_model(case: str):
    read, list_names, convert = cases()[case]
    layout, originals = read(), list_names()
    names = Names(layout)
    targets = [find(names, original) for original in originals]
    assert targets == [find(names, original, flat=True) for original in originals]
    checkpoint = Tagged()
    for number, (original, target) in enumerate(zip(originals, targets, strict=True)):
        tags = torch.tensor([tag(number, row) for row in range(target.out_features)])
        checkpoint[f"{original}.weight"], checkpoint[f"{original}.bias"] = tags[:, None], tags
    converted = convert(checkpoint)
    denoiser = layout.modules[0].component
    ours = rows_reached(originals, targets)
    for index, module in enumerate(layout.modules):
        if module.component == denoiser:
            weight = converted.get(f"{module.name}.weight")
            assert weight is not None, f"diffusers puts nothing at {module.name}"
            assert len(weight) == module.out_features
            assert torch.equal(weight.flatten(), ours[index]), module.name
    assert set(ours) == {index for index, one in enumerate(layout.modules) if one.component == denoiser}


def test_every_row_of_ltx2_goes_where_diffusers_puts_it():
    """LTX-2 apart: diffusers converts 2.0 alone, so 2.3's modulations of the prompt are not in the comparison."""
    layout, originals = base("ltx2"), ltx2_names()
    names = Names(layout)
    targets = [find(names, original) for original in originals]
    checkpoint = {
        f"{original}.weight": torch.full((1, 1), number) for number, original in enumerate(originals)
    }
    converted = single_file_utils.convert_ltx2_transformer_to_diffusers(checkpoint)
    ours = {layout.modules[one.shares[0].module].name: number for number, one in enumerate(targets)}
    assert {f"{name}.weight": number for name, number in ours.items()} == {
        name: int(tensor) for name, tensor in converted.items()
    }
    assert {one.name for one in layout.modules if "prompt" not in one.name} == set(ours)


