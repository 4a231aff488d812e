"""The module names of the original Wan 2.1 and 2.2 code, as musubi, DiffSynth, diffusion-pipe and ComfyUI use them."""

from adapter_store.dialects.original import OriginalName, in_blocks

_BLOCK = (
    *((f"self_attn.{one}", f"attn1.to_{one}") for one in "qkv"),
    ("self_attn.o", "attn1.to_out.0"),
    *((f"cross_attn.{one}", f"attn2.to_{one}") for one in "qkv"),
    ("cross_attn.o", "attn2.to_out.0"),
    ("cross_attn.k_img", "attn2.add_k_proj"),
    ("cross_attn.v_img", "attn2.add_v_proj"),
    ("ffn.0", "ffn.net.0.proj"),
    ("ffn.2", "ffn.net.2"),
)

TABLE = (
    *in_blocks("blocks.{}", "blocks.{}", _BLOCK),
    *in_blocks("vace_blocks.{}", "vace_blocks.{}", (*_BLOCK, ("before_proj", "proj_in"), ("after_proj", "proj_out"))),
    OriginalName("time_embedding.0", ("condition_embedder.time_embedder.linear_1",)),
    OriginalName("time_embedding.2", ("condition_embedder.time_embedder.linear_2",)),
    OriginalName("time_projection.1", ("condition_embedder.time_proj",)),
    OriginalName("text_embedding.0", ("condition_embedder.text_embedder.linear_1",)),
    OriginalName("text_embedding.2", ("condition_embedder.text_embedder.linear_2",)),
    OriginalName("img_emb.proj.1", ("condition_embedder.image_embedder.ff.net.0.proj",)),
    OriginalName("img_emb.proj.3", ("condition_embedder.image_embedder.ff.net.2",)),
    OriginalName("head.head", ("proj_out",)),
)
