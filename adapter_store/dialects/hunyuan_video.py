"""The module names of the original HunyuanVideo code, as musubi, FramePack, ComfyUI and OneTrainer use them.

ComfyUI renames the model's layers as in FLUX.1; OneTrainer counts the MLP's layers from 0.
"""

from collections.abc import Iterator

from adapter_store.dialects.original import OriginalName, in_blocks


def _stream(
    stream: str, qkv: tuple[str, ...], out: str, ff: str, norm: str
) -> Iterator[tuple[str, str | tuple[str, ...]]]:
    for attention in (f"{stream}_attn_", f"{stream}_attn."):
        yield f"{attention}qkv", qkv
        yield f"{attention}proj", out
    for first, second in (("fc1", "fc2"), ("fc0", "fc2"), ("0", "2")):
        yield f"{stream}_mlp.{first}", f"{ff}.net.0.proj"
        yield f"{stream}_mlp.{second}", f"{ff}.net.2"
    yield f"{stream}_mod.linear", norm
    yield f"{stream}_mod.lin", norm


_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_REFINER = (
    ("self_attn_qkv", _QKV),
    ("self_attn.qkv", _QKV),
    ("self_attn_proj", "attn.to_out.0"),
    ("self_attn.proj", "attn.to_out.0"),
    *((f"mlp.{first}", "ff.net.0.proj") for first in ("fc1", "fc0", "0")),
    *((f"mlp.{second}", "ff.net.2") for second in ("fc2", "2")),
    ("adaLN_modulation.1", "norm_out.linear"),
)
# name, other names of its two layers, ours
_EMBEDDERS = (
    ("time_in", (("mlp.0", "mlp.2"), ("in_layer", "out_layer")), "time_text_embed.timestep_embedder"),
    ("guidance_in", (("mlp.0", "mlp.2"), ("in_layer", "out_layer")), "time_text_embed.guidance_embedder"),
    ("vector_in", (("in_layer", "out_layer"),), "time_text_embed.text_embedder"),
    (
        "txt_in.t_embedder",
        (("mlp.0", "mlp.2"), ("in_layer", "out_layer"), ("linear_1", "linear_2")),
        "context_embedder.time_text_embed.timestep_embedder",
    ),
    (
        "txt_in.c_embedder",
        (("linear_1", "linear_2"), ("in_layer", "out_layer")),
        "context_embedder.time_text_embed.text_embedder",
    ),
)

TABLE = (
    *in_blocks(
        "double_blocks.{}",
        "transformer_blocks.{}",
        (
            *_stream("img", _QKV, "attn.to_out.0", "ff", "norm1.linear"),
            *_stream("txt", _ADDED_QKV, "attn.to_add_out", "ff_context", "norm1_context.linear"),
        ),
    ),
    *in_blocks(
        "single_blocks.{}",
        "single_transformer_blocks.{}",
        (
            ("linear1", (*_QKV, "proj_mlp")),
            ("linear2", "proj_out"),
            ("modulation.linear", "norm.linear"),
            ("modulation.lin", "norm.linear"),
        ),
    ),
    *in_blocks(
        "txt_in.individual_token_refiner.blocks.{}", "context_embedder.token_refiner.refiner_blocks.{}", _REFINER
    ),
    *(
        OriginalName(f"{name}.{layer}", (f"{ours}.linear_{number}",))
        for name, spellings, ours in _EMBEDDERS
        for spelling in spellings
        for number, layer in enumerate(spelling, start=1)
    ),
    OriginalName("txt_in.input_embedder", ("context_embedder.proj_in",)),
    OriginalName("final_layer.linear", ("proj_out",)),
    OriginalName("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped=True),
)
