"""The start of a key: which component, and whether the module's name is dotted or underscored."""

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
    ("transformer.", "transformer"),
    ("transformer_2.", "transformer_2"),
    ("unet.", "unet"),
    ("text_encoder.", "text_encoder"),
    ("text_encoder_2.", "text_encoder_2"),
    ("text_encoder_3.", "text_encoder_3"),
    ("text_encoders.clip_l.transformer.", "text_encoder"),
    ("text_encoders.clip_g.transformer.", "text_encoder_2"),
    ("text_encoders.t5xxl.transformer.", "text_encoder_2"),
    ("connectors.", "connectors"),
    ("text_embedding_projection.", "text_embedding_projection"),
)

KNOWN_PREFIXES = tuple(prefix for prefix, _ in (*_FLAT, *_DOTTED))


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
    while found := next((row for row in _DOTTED if stem.startswith(row[0])), None):
        prefix, meaning = found
        component = meaning or component
        by_path = by_path or prefix.startswith("text_encoders.")
        stem = stem.removeprefix(prefix)
    return ModuleName(component, stem, flat=False, by_path=by_path)
