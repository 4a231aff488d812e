"""The start of a key: which component, and whether the module's name is dotted or underscored."""

import re
from dataclasses import dataclass

# A component, or what a trainer knows of it.
ANY = "any"
DENOISER = "denoiser"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")

# Underscored names. The number of a text encoder differs between trainers: the path decides, the number is a hint.
_FLAT = (
    ("lora_unet_", DENOISER),
    ("lora_transformer_", DENOISER),
    ("lycoris_", DENOISER),
    ("Hunyuan_video_I2V_lora_", DENOISER),
    ("lora_te1_", TEXT_ENCODERS[0]),
    ("lora_te2_", TEXT_ENCODERS[1]),
    ("lora_te3_", TEXT_ENCODERS[2]),
    ("lora_te_", TEXT_ENCODERS[0]),
)

# Dotted names; stripped one after the other in any nesting. "" says nothing about the component.
_DOTTED = (
    ("base_model.model.", ""),
    ("model.diffusion_model.", DENOISER),
    ("diffusion_model.", DENOISER),
    ("conditional_transformer.", DENOISER),
    ("transformer.", "transformer"),
    ("transformer_2.", "transformer_2"),
    ("unet.", "unet"),
    ("text_encoder.", "text_encoder"),
    ("text_encoder_2.", "text_encoder_2"),
    ("text_encoder_3.", "text_encoder_3"),
    ("connectors.", "connectors"),
    ("text_embedding_projection.", "text_embedding_projection"),
)

# Text encoders by their own names, as ComfyUI and OneTrainer have them: hints like the numbers.
_ENCODER_NAMES = (
    (re.compile(r"text_encoders\.clip_g\.(transformer\.)?|clip_g\."), TEXT_ENCODERS[1]),
    (re.compile(r"text_encoders\.[^.]+\.(transformer\.)?|(clip_l|t5|llama)\."), TEXT_ENCODERS[0]),
)

KNOWN_PREFIXES = (*(prefix for prefix, _ in (*_FLAT, *_DOTTED)), "text_encoders.<name>.transformer.", "clip_l.", "t5.")


@dataclass(frozen=True)
class ModuleName:
    """A module as a trainer names it. `component` is a component's name, DENOISER or ANY.

    `by_path` says that the component is a hint only, and that the path decides between the text encoders.
    """

    component: str
    path: str
    flat: bool
    by_path: bool = False


def split_prefix(stem: str) -> ModuleName:
    """Take the known prefixes off `stem`; what remains may still be no name of a module."""
    for prefix, component in _FLAT:
        if stem.startswith(prefix):
            path = stem.removeprefix(prefix).lstrip("_")
            return ModuleName(component, path, flat=True, by_path=component in TEXT_ENCODERS)
    component, by_path = ANY, False
    while found := _dotted_prefix(stem):
        prefix, meaning, named = found
        component, by_path = meaning or component, by_path or named
        stem = stem.removeprefix(prefix)
    return ModuleName(component, stem, flat=False, by_path=by_path)


def _dotted_prefix(stem: str) -> tuple[str, str, bool] | None:
    """The prefix, what it says of the component, and whether it is a text encoder's own name."""
    for prefix, component in _DOTTED:
        if stem.startswith(prefix):
            return prefix, component, False
    for pattern, component in _ENCODER_NAMES:
        if match := pattern.match(stem):
            return match[0], component, True
    return None
