"""The module names of the original FLUX.1 code, as kohya, ai-toolkit, OneTrainer, XLabs and USO use them."""

from adapter_store.dialects.original import OriginalName, in_blocks

_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")

TABLE = (
    *in_blocks(
        "double_blocks.{}",
        "transformer_blocks.{}",
        (
            ("img_attn.qkv", _QKV),
            ("img_attn.proj", "attn.to_out.0"),
            ("img_mlp.0", "ff.net.0.proj"),
            ("img_mlp.2", "ff.net.2"),
            ("img_mod.lin", "norm1.linear"),
            ("txt_attn.qkv", _ADDED_QKV),
            ("txt_attn.proj", "attn.to_add_out"),
            ("txt_mlp.0", "ff_context.net.0.proj"),
            ("txt_mlp.2", "ff_context.net.2"),
            ("txt_mod.lin", "norm1_context.linear"),
            # XLabs: 1 is the image stream, 2 the text stream.
            ("processor.qkv_lora1", _QKV),
            ("processor.proj_lora1", "attn.to_out.0"),
            ("processor.qkv_lora2", _ADDED_QKV),
            ("processor.proj_lora2", "attn.to_add_out"),
        ),
    ),
    *in_blocks(
        "single_blocks.{}",
        "single_transformer_blocks.{}",
        (
            ("linear1", (*_QKV, "proj_mlp")),
            ("linear2", "proj_out"),
            ("modulation.lin", "norm.linear"),
            ("processor.qkv_lora", _QKV),
            ("processor.proj_lora", "proj_out"),
        ),
    ),
    OriginalName("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
    OriginalName("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
    OriginalName("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
    OriginalName("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
    OriginalName("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
    OriginalName("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
    OriginalName("img_in", ("x_embedder",)),
    OriginalName("txt_in", ("context_embedder",)),
    OriginalName("final_layer.linear", ("proj_out",)),
    OriginalName("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped=True),
)
