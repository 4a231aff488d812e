"""Which family a file was probably trained for. For messages and reports only: no decision rests on it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from adapter_store.dialects.names import Names
from adapter_store.dialects.prefixes import split_prefix
from loraplex.layout import Layout

_SD = ("Stable Diffusion 1 or 2", "SDXL")
_BFL = ("Flux.1", "Flux.2", "HunyuanVideo")
_JOINT = ("Flux.1", "Flux.2", "SD3", "Qwen-Image", "HunyuanVideo")

# On underscored names; the first that matches counts, for each of its families.
_PATTERNS = tuple(
    (re.compile(pattern), families)
    for pattern, families in (
        (r"\d_transformer_blocks_[1-9]\d*_attn[12]_|label_emb|add_embedding|lora_te2_text_projection", ("SDXL",)),
        (r"(down|up)_blocks_3_|input_blocks_(9|1\d)_|output_blocks_(9|1\d)_", ("Stable Diffusion 1 or 2",)),
        (r"(down|up|input|output)_blocks_\d|mid_block_|middle_block_|time_embed_[02]|time_embedding_linear", _SD),
        (r"joint_blocks_\d", ("SD3",)),
        (
            r"stream_modulation|to_qkv_mlp_proj|ff_(context_)?linear_|time_guidance_embed|(^|_)sformer_",
            ("Flux.2",),
        ),
        (
            r"(img|txt)_mlp_fc\d|token_refiner|(img|txt)_mod_linear|modulation_linear|image_projection",
            ("HunyuanVideo",),
        ),
        (r"_mod_lin$|_modulation_lin$|_blocks_\d+_processor", ("Flux.1",)),
        (r"vector_in", ("Flux.1", "HunyuanVideo")),
        (r"pos_embed_proj$", ("SD3",)),
        (r"context_embedder$", ("Flux.1", "SD3")),
        (r"(double|single)_blocks_\d", _BFL),
        (r"single_transformer_blocks_\d+_(proj_|norm_|attn_to_[qkv])", ("Flux.1", "HunyuanVideo")),
        (r"(img|txt)_(mlp_net|mod_1)", ("Qwen-Image",)),
        (r"transformer_blocks_\d+_(audio_|video_to_audio|attn[12]_)|patchify_proj|adaln_single", ("LTX-Video",)),
        (r"transformer_blocks_\d+_(norm1|ff)", ("Flux.1", "SD3", "HunyuanVideo", "LTX-Video")),
        (r"transformer_blocks_\d+_attn_", _JOINT),
        (r"blocks_\d+_(self_attn|cross_attn|ffn|attn[12])_|condition_embedder|head_head", ("Wan",)),
        (r"(layers|refiner)_\d+_(attention|feed_forward|adaLN)|cap_embedder|all_(x_embed|final)", ("Z-Image",)),
    )
)


def family_of(stems: Iterable[str]) -> str:
    """The family whose names these are, such as "Flux.1"; several that fit alike as "A or B"; "" if none does."""
    counts = _counts([stem.replace(".", "_") for stem in stems])
    return " or ".join(family for family, count in counts.items() if count == max(counts.values()))


def describe_family(
    stems: Iterable[str], candidates: Mapping[str, Layout] | None = None, loaded: Layout | None = None
) -> str:
    """A sentence for a file that does not fit `loaded`; "" when nothing is recognised.

    With `candidates`, base models by name, such as "412 of 456 modules match Wan 2.1 14B, 0 match flux.1-dev.";
    of several that fit alike the smallest is named. Without, such as "412 of 456 modules are named as in Wan.".
    """
    given = list(stems)
    fits = {name: _matches(given, layout) for name, layout in (candidates or {}).items()}
    if candidates and any(fits.values()):
        best = max(fits, key=lambda name: (fits[name], -len(candidates[name].modules)))
        text = f"{fits[best]} of {len(given)} modules match {best}"
        if loaded is None or loaded.base_model == best:
            return f"{text}."
        return f"{text}, {_matches(given, loaded)} match {loaded.base_model}."
    names = [stem.replace(".", "_") for stem in given]
    family = family_of(names)
    return f"{max(_counts(names).values())} of {len(names)} modules are named as in {family}." if family else ""


def _counts(names: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name in names:
        counts.update(next((families for pattern, families in _PATTERNS if pattern.search(name)), ()))
    return counts


def _matches(stems: Iterable[str], layout: Layout) -> int:
    names = _names(layout)
    return sum(names.knows(split_prefix(stem)) for stem in stems)


@lru_cache(maxsize=64)
def _names(layout: Layout) -> Names:
    return Names(layout)
