"""The module names of the original FLUX.2 code, as ai-toolkit, musubi and ComfyUI use them.

A single block's `linear1` is one module in diffusers too. Files with its q, k, v and MLP apart are read as well.
"""

from adapter_store.dialects.original import Fused, OriginalName, in_blocks

_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_DOUBLE_MODULES = (
    *_QKV,
    "attn.to_out.0",
    "ff.linear_in",
    "ff.linear_out",
    *_ADDED_QKV,
    "attn.to_add_out",
    "ff_context.linear_in",
    "ff_context.linear_out",
)

# q, k and v are as wide as the model; the gated MLP is three times as wide, twice.
FUSED = (Fused("attn.to_qkv_mlp_proj", (*_QKV, "proj_mlp"), last=6),)

TABLE = (
    *in_blocks(
        "double_blocks.{}",
        "transformer_blocks.{}",
        (
            ("img_attn.qkv", _QKV),
            ("img_attn.proj", "attn.to_out.0"),
            ("img_mlp.0", "ff.linear_in"),
            ("img_mlp.2", "ff.linear_out"),
            ("txt_attn.qkv", _ADDED_QKV),
            ("txt_attn.proj", "attn.to_add_out"),
            ("txt_mlp.0", "ff_context.linear_in"),
            ("txt_mlp.2", "ff_context.linear_out"),
        ),
    ),
    *in_blocks(
        "single_blocks.{}",
        "single_transformer_blocks.{}",
        (
            ("linear1", (*_QKV, "proj_mlp")),
            ("linear1", "attn.to_qkv_mlp_proj"),
            ("linear2", "attn.to_out"),
        ),
    ),
    # Some exports cut "transformer_blocks." short.
    *in_blocks("sformer_blocks.{}", "transformer_blocks.{}", tuple((module, module) for module in _DOUBLE_MODULES)),
    OriginalName("double_stream_modulation_img.lin", ("double_stream_modulation_img.linear",)),
    OriginalName("double_stream_modulation_txt.lin", ("double_stream_modulation_txt.linear",)),
    OriginalName("single_stream_modulation.lin", ("single_stream_modulation.linear",)),
    OriginalName("time_in.in_layer", ("time_guidance_embed.timestep_embedder.linear_1",)),
    OriginalName("time_in.out_layer", ("time_guidance_embed.timestep_embedder.linear_2",)),
    OriginalName("guidance_in.in_layer", ("time_guidance_embed.guidance_embedder.linear_1",)),
    OriginalName("guidance_in.out_layer", ("time_guidance_embed.guidance_embedder.linear_2",)),
    OriginalName("img_in", ("x_embedder",)),
    OriginalName("txt_in", ("context_embedder",)),
    OriginalName("final_layer.linear", ("proj_out",)),
    OriginalName("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped=True),
)
