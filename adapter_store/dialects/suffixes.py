"""The end of a key: which algorithm, and which part of it."""

import re
from dataclasses import dataclass
from enum import Enum

from adapter_store.errors import Cause, rejected
from loraplex.errors import AdapterRejected


class Algorithm(str, Enum):
    """How a file stores the difference of a module."""

    LORA = "LoRA"
    LOHA = "LoHa"
    LOKR = "LoKr"
    FULL = "full difference"


ALPHA = "alpha"


@dataclass(frozen=True)
class Extra:
    """A tensor that is no part of a difference that can be applied.

    `kind` is what a caller may waive it as, "" for nothing. `adds` says that it is added to the model, so that it
    changes nothing when all its numbers are zero.
    """

    name: str
    cause: Cause = Cause.UNSUPPORTED_ALGORITHM
    kind: str = ""
    adds: bool = False

    def refusal(self, key: str) -> AdapterRejected:
        """The error that names it."""
        if self.cause is Cause.UNKNOWN_KEY:
            return rejected(self.cause, f"{key[:200]!r} is no tensor of a LoRA that this store knows.", key)
        if self.adds:
            message = f"{key[:200]!r} is {self.name} that is not zero; it is not applied here."
            return rejected(self.cause, message, key)
        return rejected(self.cause, f"{key[:200]!r} is {self.name}, which this store does not apply.", key)


_EMBEDDING = "embedding"
NORM_DIFFERENCE = Extra("a difference of a norm", kind="norm", adds=True)
_UNKNOWN = Extra("", Cause.UNKNOWN_KEY)


@dataclass(frozen=True)
class Suffix:
    """A key taken apart: `stem` is prefix and module name, `part` the tensor's place in its algorithm.

    `infix` is the name that peft gave the adapter. An alpha belongs to whatever algorithm its module has.
    """

    stem: str
    algorithm: Algorithm
    part: str
    dialect: str
    infix: str = ""


_INFIX = r"(?:\.(?P<infix>[^.]+)(?=\.weight$))?"

# pattern, algorithm, part (or the group that names it), dialect; the first that matches the end of the key counts.
_PARTS = tuple(
    (re.compile(pattern + "$"), algorithm, part, dialect)
    for pattern, algorithm, part, dialect in (
        (rf"\.lora_A{_INFIX}(?:\.weight)?", Algorithm.LORA, "A", "peft"),
        (rf"\.lora_B{_INFIX}(?:\.weight)?", Algorithm.LORA, "B", "peft"),
        (r"\.lora_down\.weight", Algorithm.LORA, "A", "kohya"),
        (r"\.lora_up\.weight", Algorithm.LORA, "B", "kohya"),
        (r"\.lora_mid\.weight", Algorithm.LORA, "mid", "kohya"),
        (r"\.lora\.down\.weight", Algorithm.LORA, "A", "diffusers"),
        (r"\.lora\.up\.weight", Algorithm.LORA, "B", "diffusers"),
        (r"\.lora_linear_layer\.down\.weight", Algorithm.LORA, "A", "diffusers"),
        (r"\.lora_linear_layer\.up\.weight", Algorithm.LORA, "B", "diffusers"),
        (r"(?<=_lora)\.down\.weight", Algorithm.LORA, "A", "xlabs"),
        (r"(?<=_lora)\.up\.weight", Algorithm.LORA, "B", "xlabs"),
        (r"(?<=_lora[12])\.down\.weight", Algorithm.LORA, "A", "xlabs"),
        (r"(?<=_lora[12])\.up\.weight", Algorithm.LORA, "B", "xlabs"),
        (r"\.hada_(?P<part>w[12]_[ab]|t[12])", Algorithm.LOHA, "", "lycoris"),
        (r"\.lokr_(?P<part>w[12](?:_[ab])?|t2)", Algorithm.LOKR, "", "lycoris"),
        (r"\.(?P<part>diff)", Algorithm.FULL, "", "lycoris"),
        (r"\.(?P<part>alpha)", Algorithm.LORA, "", ""),
    )
)

# What is known by its start or its name, whatever algorithm it has.
_STARTS = tuple(
    (re.compile(pattern), extra)
    for pattern, extra in (
        (
            r"^(bundle_emb|emb_params|string_to_param)|embeddings\.pti",
            Extra("embeddings", Cause.TEXTUAL_INVERSION, _EMBEDDING),
        ),
        (r"(token|position)_embedding\.diff$", Extra("a difference of an embedding", kind=_EMBEDDING, adds=True)),
        (r"^oft_unet_", Extra("OFT")),
        (r"^lllite_unet", Extra("ControlNet-LLLite", Cause.CONTROL_LORA)),
        (r"^lora_controlnet", Extra("a control LoRA", Cause.CONTROL_LORA)),
        (r"^lora_prior_", Extra("a LoRA for Stable Cascade")),
    )
)

# What is known by its end.
_ENDS = tuple(
    (re.compile(pattern), extra)
    for pattern, extra in (
        (r"\.lora_B(\.[^.]+)?\.bias$", Extra("a bias of B", Cause.BIAS_DIFFERENCE, "bias", adds=True)),
        (r"\.diff_b$", Extra("a bias difference", Cause.BIAS_DIFFERENCE, "bias", adds=True)),
        (r"\.b_norm$", Extra("a difference of a norm's bias", Cause.BIAS_DIFFERENCE, "norm", adds=True)),
        (r"\.w_norm$", NORM_DIFFERENCE),
        (r"\.(oft_blocks|oft_[Rr](\.weight)?|oft_diag|boft_[Rs]|rescale)$", Extra("OFT or BOFT")),
        (r"\.(reshape_weight|set_weight)$|norm\.scale$", Extra("a control LoRA", Cause.CONTROL_LORA)),
        (r"\.dora_scale$|\.lora_magnitude_vector(\.|$)", Extra("DoRA (it needs the weights of the base model)")),
        (r"\.lokr_t1$", Extra("LoKr with a first factor of three parts")),
        (r"\.(a[12]|b[12]|bm)\.weight$", Extra("GLoRA")),
        (r"\.(on_input|ia3_l)$", Extra("IA3")),
        (r"\.vera_lambda_[bd]$", Extra("VeRA")),
        (r"\.lora_embedding_[AB](\.|$)", Extra("a LoRA of an embedding", kind=_EMBEDDING)),
        (r"norm[^.]*\.(weight|bias)$", Extra("a norm's own weights (modules_to_save)", kind="norm")),
        (r"\.bias$", Extra("a bias of its own (modules_to_save)", kind="bias")),
        (r"\.(weight|scale)$", Extra("full weights (modules_to_save or a checkpoint)")),
    )
)


def split_suffix(key: str) -> Suffix | Extra:
    """Take the end off `key`, or say what it is instead."""
    for start, extra in _STARTS:
        if start.search(key):
            return extra
    for pattern, algorithm, part, dialect in _PARTS:
        if match := pattern.search(key):
            named = match.groupdict()
            return Suffix(key[: match.start()], algorithm, part or named["part"], dialect, named.get("infix") or "")
    return next((extra for end, extra in _ENDS if end.search(key)), _UNKNOWN)
