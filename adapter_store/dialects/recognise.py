"""Which family a foreign file was probably trained for. For messages only: no decision rests on it."""

import re
from collections import Counter
from collections.abc import Iterable

# On underscored names; the first that matches counts.
_FAMILIES = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("Stable Diffusion or SDXL", r"(down|up|input|output)_blocks_\d|mid_block_|middle_block_"),
        ("SD3", r"joint_blocks_\d"),
        ("Flux.2", r"(double|single)_stream_modulation"),
        ("HunyuanVideo", r"double_blocks_\d+_(img|txt)_mlp_fc\d|individual_token_refiner"),
        ("Flux.1", r"(double|single)_blocks_\d+_|single_transformer_blocks_\d"),
        ("Qwen-Image", r"transformer_blocks_\d+_(img|txt)_(mlp|mod)"),
        ("Wan", r"(^|_)blocks_\d+_(self_attn|cross_attn|ffn)"),
        ("LTX-Video", r"transformer_blocks_\d+_attn[12]_"),
        ("Z-Image", r"(layers|refiner)_\d+_(attention|feed_forward|adaLN)"),
        ("Flux.1, SD3 or Qwen-Image", r"transformer_blocks_\d+_attn_"),
    )
)


def describe_family(paths: Iterable[str]) -> str:
    """A sentence such as "412 of 456 modules are named as in Wan."; empty when nothing is recognised."""
    names = [path.replace(".", "_") for path in paths]
    counts = Counter(family for name in names if (family := _family(name)))
    if not counts:
        return ""
    family, count = counts.most_common(1)[0]
    return f"{count} of {len(names)} modules are named as in {family}."


def _family(name: str) -> str:
    return next((family for family, pattern in _FAMILIES if pattern.search(name)), "")
