"""The module names of the original Stable Diffusion 3 and 3.5 code, as kohya, OneTrainer and ComfyUI use them."""

from adapter_store.dialects.original import OriginalName, in_blocks

TABLE = (
    *in_blocks(
        "joint_blocks.{}",
        "transformer_blocks.{}",
        (
            ("x_block.attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v")),
            ("x_block.attn.proj", "attn.to_out.0"),
            ("x_block.attn2.qkv", ("attn2.to_q", "attn2.to_k", "attn2.to_v")),
            ("x_block.attn2.proj", "attn2.to_out.0"),
            ("x_block.mlp.fc1", "ff.net.0.proj"),
            ("x_block.mlp.fc2", "ff.net.2"),
            ("x_block.adaLN_modulation.1", "norm1.linear"),
            ("context_block.attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
            ("context_block.attn.proj", "attn.to_add_out"),
            ("context_block.mlp.fc1", "ff_context.net.0.proj"),
            ("context_block.mlp.fc2", "ff_context.net.2"),
            ("context_block.adaLN_modulation.1", "norm1_context.linear"),
        ),
    ),
    # The last block's context is only modulated: shift and scale, where diffusers has scale and shift.
    OriginalName(
        "joint_blocks.{last}.context_block.adaLN_modulation.1",
        ("transformer_blocks.{last}.norm1_context.linear",),
        swapped=True,
    ),
    OriginalName("x_embedder.proj", ("pos_embed.proj",)),
    OriginalName("t_embedder.mlp.0", ("time_text_embed.timestep_embedder.linear_1",)),
    OriginalName("t_embedder.mlp.2", ("time_text_embed.timestep_embedder.linear_2",)),
    OriginalName("y_embedder.mlp.0", ("time_text_embed.text_embedder.linear_1",)),
    OriginalName("y_embedder.mlp.2", ("time_text_embed.text_embedder.linear_2",)),
    OriginalName("context_embedder", ("context_embedder",)),
    OriginalName("final_layer.linear", ("proj_out",)),
    OriginalName("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped=True),
)
