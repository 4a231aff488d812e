"""The module names of the original FLUX.1 code, as kohya, ai-toolkit, OneTrainer and XLabs use them."""

from collections.abc import Iterator
from typing import NamedTuple


class OriginalName(NamedTuple):
    """One module of the original code: the rows of its B are the rows of `modules`, one after the other.

    `swapped` marks a module whose two halves of rows stand in the other order in diffusers.
    """

    name: str
    modules: tuple[str, ...]
    swapped: bool = False


_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")

_DOUBLE_BLOCK: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("img_attn.qkv", _QKV),
    ("img_attn.proj", ("attn.to_out.0",)),
    ("img_mlp.0", ("ff.net.0.proj",)),
    ("img_mlp.2", ("ff.net.2",)),
    ("img_mod.lin", ("norm1.linear",)),
    ("txt_attn.qkv", _ADDED_QKV),
    ("txt_attn.proj", ("attn.to_add_out",)),
    ("txt_mlp.0", ("ff_context.net.0.proj",)),
    ("txt_mlp.2", ("ff_context.net.2",)),
    ("txt_mod.lin", ("norm1_context.linear",)),
    # XLabs: 1 is the image stream, 2 the text stream.
    ("processor.qkv_lora1", _QKV),
    ("processor.proj_lora1", ("attn.to_out.0",)),
    ("processor.qkv_lora2", _ADDED_QKV),
    ("processor.proj_lora2", ("attn.to_add_out",)),
)
_SINGLE_BLOCK: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("linear1", (*_QKV, "proj_mlp")),
    ("linear2", ("proj_out",)),
    ("modulation.lin", ("norm.linear",)),
    ("processor.qkv_lora", _QKV),
    ("processor.proj_lora", ("proj_out",)),
)
_EMBEDDERS = (("time_in", "timestep_embedder"), ("vector_in", "text_embedder"), ("guidance_in", "guidance_embedder"))


def original_names(num_double: int, num_single: int) -> Iterator[OriginalName]:
    """Every module of a model with that many double and single blocks; modules that a model lacks are included."""
    for index in range(num_double):
        for name, modules in _DOUBLE_BLOCK:
            paths = tuple(f"transformer_blocks.{index}.{module}" for module in modules)
            yield OriginalName(f"double_blocks.{index}.{name}", paths)
    for index in range(num_single):
        for name, modules in _SINGLE_BLOCK:
            paths = tuple(f"single_transformer_blocks.{index}.{module}" for module in modules)
            yield OriginalName(f"single_blocks.{index}.{name}", paths)
    for name, embedder in _EMBEDDERS:
        yield OriginalName(f"{name}.in_layer", (f"time_text_embed.{embedder}.linear_1",))
        yield OriginalName(f"{name}.out_layer", (f"time_text_embed.{embedder}.linear_2",))
    yield OriginalName("img_in", ("x_embedder",))
    yield OriginalName("txt_in", ("context_embedder",))
    yield OriginalName("final_layer.linear", ("proj_out",))
    yield OriginalName("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped=True)
