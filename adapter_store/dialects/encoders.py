"""The text encoders: spellings of their modules, and which kind of encoder a path belongs to."""

from collections.abc import Iterator

_TEXT_MODEL = "text_model."  # a level of CLIP's names that newer releases of transformers dropped
_LEVELS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")  # of language models
# First-generation diffusers named CLIP's attention as the UNet's.
_ATTENTION = (("q_proj", "to_q_lora"), ("k_proj", "to_k_lora"), ("v_proj", "to_v_lora"), ("out_proj", "to_out_lora"))

CLIP, T5, LANGUAGE_MODEL = "CLIP", "T5", "language model"
_KINDS = (
    ("encoder_layers_", CLIP),
    ("text_projection", "CLIP with a text projection"),
    ("encoder_block_", T5),
    ("layers_", LANGUAGE_MODEL),
)
# A pipeline has one encoder of these kinds, whatever number a trainer gave it.
FOUND_BY_PATH = (T5, LANGUAGE_MODEL)


def kind_of(path: str) -> str:
    """What sort of encoder has a module of this name, dotted or underscored; "" if none that is known."""
    flat = path.replace(".", "_")
    for level in ("text_model_", *(level.replace(".", "_") for level in reversed(_LEVELS) if level)):
        flat = flat.removeprefix(level)
    return next((kind for start, kind in _KINDS if flat.startswith(start)), "")


def spellings(path: str) -> Iterator[str]:
    """All names of a text encoder's module, its own first."""
    yield path
    kind = kind_of(path)
    if kind == CLIP:
        tail = path.removeprefix(_TEXT_MODEL)
        for name in (tail, *_first_generation(tail)):
            yield name
            yield _TEXT_MODEL + name
    if kind == LANGUAGE_MODEL:
        tail = path[path.index("layers.") :]
        yield from (level + tail for level in _LEVELS)


def _first_generation(path: str) -> Iterator[str]:
    for ours, name in _ATTENTION:
        if path.endswith(f"self_attn.{ours}"):
            yield path.removesuffix(ours) + name
