"""The module names of ComfyUI's Z-Image, which fuses q, k and v, and a spelling with dots that one trainer writes."""

from adapter_store.dialects.original import OriginalName, in_blocks

_ATTENTION = (
    ("attention.qkv", ("attention.to_q", "attention.to_k", "attention.to_v")),
    ("attention.out", "attention.to_out.0"),
    ("attention.to_out.0", "attention.out"),  # where the layout has ComfyUI's names
    *((f"attention.to.{one}", f"attention.to_{one}") for one in "qkv"),
)
_BLOCKS = ("layers.{}", "noise_refiner.{}", "context_refiner.{}", "siglip_refiner.{}")

TABLE = (
    *(row for block in _BLOCKS for row in in_blocks(block, block, _ATTENTION)),
    OriginalName("x_embedder", ("all_x_embedder.2-1",)),
    OriginalName("final_layer.linear", ("all_final_layer.2-1.linear",)),
    OriginalName("final_layer.adaLN_modulation.1", ("all_final_layer.2-1.adaLN_modulation.1",)),
)
