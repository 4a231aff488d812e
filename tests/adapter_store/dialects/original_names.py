"""The modules of the original code of every family, written down from that code: what trainers name."""

from collections.abc import Callable


def blocks(container: str, indexes: range, names: tuple[str, ...]) -> list[str]:
    return [f"{container}.{index}.{name}" for index in indexes for name in names]


def flux_names(num_double: int = 2, num_single: int = 2) -> list[str]:
    streams = [f"{s}_{n}" for s in ("img", "txt") for n in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")]
    embedders = [f"{name}_in.{layer}_layer" for name in ("time", "vector", "guidance") for layer in ("in", "out")]
    return [
        *blocks("double_blocks", range(num_double), tuple(streams)),
        *blocks("single_blocks", range(num_single), ("linear1", "linear2", "modulation.lin")),
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


def unet_names(attentive: tuple[int, ...], depths: tuple[int, ...], mid_depth: int, labels: bool) -> list[str]:
    """The modules of the original UNet as its own constructor counts them: two layers to a block, three on the way up.

    `attentive` are the blocks with attention, `depths` the number of their transformer blocks; `labels` says that the
    model sees the size of the image.
    """
    last = len(depths) - 1
    outside = ["time_embed.0", "time_embed.2", "input_blocks.0.0", "out.2"]
    if labels:
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


def of_sd() -> list[str]:
    """Stable Diffusion 1 and 2."""
    return unet_names((0, 1, 2), (1, 1, 1, 1), 1, labels=False)


# By the names in `bases`.
ORIGINAL_NAMES: dict[str, Callable[[], list[str]]] = {
    "sd1": of_sd,
    "sd2": of_sd,
    "sdxl": lambda: unet_names((1, 2), (0, 2, 4), 4, labels=True),
    "sdxl-refiner": lambda: unet_names((1, 2), (0, 4, 4, 0), 4, labels=True),
    "sd3": sd3_names,
    "flux": flux_names,
    "flux-dev": lambda: flux_names(19, 38),
    "flux-kontext": flux_names,
    "flux2": flux2_names,
    "flux2-klein": flux2_names,
    "z-image": z_image_names,
    "wan": wan_names,
    "wan-i2v": lambda: wan_names(image=True),
    "wan-vace": vace_names,
    "wan2.2": wan_names,
    "hunyuan-video": hunyuan_video_names,
    "ltx": ltx_names,
    "ltx2": ltx2_names,
}
