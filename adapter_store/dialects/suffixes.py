"""The end of a key: which algorithm, and which part of it."""

import re
from dataclasses import dataclass
from enum import Enum

from adapter_store.errors import Cause, rejected


class Part(Enum):
    """What a tensor is to its module."""

    A = "A"
    B = "B"
    ALPHA = "alpha"
    # Differences that are nothing when all their numbers are zero, and are refused otherwise.
    DIFFERENCE = "difference"


@dataclass(frozen=True)
class Suffix:
    """A key taken apart: `stem` is prefix and module name, `infix` the name that peft gave the adapter."""

    stem: str
    part: Part
    dialect: str
    infix: str = ""
    cause: Cause = Cause.UNSUPPORTED_ALGORITHM
    algorithm: str = "LoRA"


_INFIX = r"(?:\.(?P<infix>[^.]+)(?=\.weight$))?"

# pattern, part, dialect; the first that matches the end of the key counts.
_LORA = tuple(
    (re.compile(pattern + "$"), part, dialect)
    for pattern, part, dialect in (
        (rf"\.lora_A{_INFIX}(?:\.weight)?", Part.A, "peft"),
        (rf"\.lora_B{_INFIX}(?:\.weight)?", Part.B, "peft"),
        (r"\.lora_down\.weight", Part.A, "kohya"),
        (r"\.lora_up\.weight", Part.B, "kohya"),
        (r"\.lora\.down\.weight", Part.A, "diffusers"),
        (r"\.lora\.up\.weight", Part.B, "diffusers"),
        (r"\.lora_linear_layer\.down\.weight", Part.A, "diffusers"),
        (r"\.lora_linear_layer\.up\.weight", Part.B, "diffusers"),
        (r"(?<=_lora)\.down\.weight", Part.A, "xlabs"),
        (r"(?<=_lora)\.up\.weight", Part.B, "xlabs"),
        (r"(?<=_lora[12])\.down\.weight", Part.A, "xlabs"),
        (r"(?<=_lora[12])\.up\.weight", Part.B, "xlabs"),
        (r"\.alpha", Part.ALPHA, ""),
    )
)

# pattern, algorithm, cause: additions to a module that are nothing when they are zero.
_DIFFERENCES = tuple(
    (re.compile(pattern + "$"), algorithm, cause)
    for pattern, algorithm, cause in (
        (r"\.lora_B(?:\.[^.]+)?\.bias", "a bias of B", Cause.BIAS_DIFFERENCE),
        (r"\.diff_b", "a bias difference", Cause.BIAS_DIFFERENCE),
        (r"\.b_norm", "a difference of a norm's bias", Cause.BIAS_DIFFERENCE),
        (r"\.diff", "a full difference", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.w_norm", "a difference of a norm", Cause.UNSUPPORTED_ALGORITHM),
    )
)

# pattern, name, cause: what is refused by its start, whatever it ends with.
_FOREIGN = tuple(
    (re.compile(pattern), algorithm, cause)
    for pattern, algorithm, cause in (
        (r"^(bundle_emb|emb_params|string_to_param)|embeddings\.pti", "embeddings", Cause.TEXTUAL_INVERSION),
        (r"^oft_unet_", "OFT", Cause.UNSUPPORTED_ALGORITHM),
        (r"^lllite_unet", "ControlNet-LLLite", Cause.CONTROL_LORA),
        (r"^lora_controlnet", "a control LoRA", Cause.CONTROL_LORA),
        (r"^lora_prior_", "a LoRA for Stable Cascade", Cause.UNSUPPORTED_ALGORITHM),
    )
)

# pattern, name, cause: what is refused by its end.
_REFUSED = tuple(
    (re.compile(pattern), algorithm, cause)
    for pattern, algorithm, cause in (
        (r"\.(oft_blocks|oft_R\.weight|rescale)$", "OFT or BOFT", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.(reshape_weight|set_weight)$|norm\.scale$", "a control LoRA", Cause.CONTROL_LORA),
        (r"\.lora_mid\.weight$", "Tucker (a LoRA in three factors)", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.dora_scale$|\.lora_magnitude_vector(\.|$)", "DoRA", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.hada_(w[12]_[ab]|t[12])$", "LoHa", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.lokr_(w[12](_[ab])?|t2)$", "LoKr", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.(a[12]|b[12]|bm)\.weight$", "GLoRA", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.on_input$", "IA3", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.lora_embedding_[AB](\.|$)", "a LoRA of an embedding", Cause.UNSUPPORTED_ALGORITHM),
        (r"\.(weight|bias|scale)$", "full weights (modules_to_save or a checkpoint)", Cause.UNSUPPORTED_ALGORITHM),
    )
)


def split_suffix(key: str) -> Suffix:
    """Take the end off `key`. Raises AdapterRejected naming the algorithm, or UNKNOWN_KEY."""
    _refuse_if_any(_FOREIGN, key)
    for pattern, algorithm, cause in _DIFFERENCES:
        if match := pattern.search(key):
            return Suffix(key[: match.start()], Part.DIFFERENCE, "", "", cause, algorithm)
    for pattern, part, dialect in _LORA:
        if match := pattern.search(key):
            return Suffix(key[: match.start()], part, dialect, match.groupdict().get("infix") or "")
    _refuse_if_any(_REFUSED, key)
    raise rejected(Cause.UNKNOWN_KEY, f"{key[:200]!r} is no tensor of a LoRA that this store knows.", key)


def _refuse_if_any(table: tuple[tuple[re.Pattern[str], str, Cause], ...], key: str) -> None:
    for pattern, algorithm, cause in table:
        if pattern.search(key):
            raise rejected(cause, f"{key[:200]!r} is {algorithm}, which this store does not apply.", key)
