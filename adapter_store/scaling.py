"""The alpha rule, one for all formats: which scaling belongs to a pair of A and B.

1. A tensor `.alpha` of the module; 2. else what the file's `lora_adapter_metadata`, or else an adapter_config.json
next to it, says of the module; 3. else 1. Where 1 and 2 disagree the file is refused. `ss_network_alpha` is never
used: alpha may differ from layer to layer.
"""

import contextlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from adapter_store.dialects.suffixes import Algorithm
from adapter_store.errors import Cause, rejected

_METADATA_KEY = "lora_adapter_metadata"
# peft's own LoHa and LoKr; their default of `r` and `alpha`.
_ALGORITHMS = {"LORA": Algorithm.LORA, "LOHA": Algorithm.LOHA, "LOKR": Algorithm.LOKR}
_LYCORIS_DEFAULT = 8
_PLAIN_PATTERN = re.compile(r"\^?[\w.-]+\$?")


@dataclass
class PeftConfig:
    """What peft notes of one component's adapter; remembers which of its patterns were of use.

    `algorithm` is the one of peft's that it is about: its notes say nothing about tensors of another.
    """

    where: str
    algorithm: Algorithm = Algorithm.LORA
    rank: float | None = None
    alpha: float | None = None
    rank_pattern: dict[str, float] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    used_patterns: set[str] = field(default_factory=set)

    def rank_of(self, path: str) -> float | None:
        """The rank noted for a module, if any."""
        return self._match(self.rank_pattern, path, self.rank)

    def alpha_of(self, path: str) -> float | None:
        """The alpha noted for a module, if any."""
        return self._match(self.alpha_pattern, path, self.alpha)

    def is_about(self, algorithm: Algorithm, key: str) -> bool:
        """Whether the notes hold for `key`. peft's LoHa and LoKr stand alone: beside them another is refused."""
        if self.algorithm not in (algorithm, Algorithm.LORA):
            message = f"{self.where} says {self.algorithm.value}, but {key[:200]!r} is {algorithm.value}."
            raise rejected(Cause.METADATA_INVALID, message, key)
        return self.algorithm is algorithm

    def check_patterns_used(self) -> None:
        """Refuse a pattern that matched no module: it was meant for one."""
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            if pattern not in self.used_patterns:
                message = f"{self.where} has a pattern {pattern[:100]!r} that matches no module of the file."
                raise rejected(Cause.METADATA_INVALID, message, self.where)

    def _match(self, patterns: dict[str, Any], path: str, default: Any) -> Any:
        for pattern, value in patterns.items():
            plain = pattern.removeprefix("^").removesuffix("$")
            if path == plain or (not pattern.startswith("^") and path.endswith(f".{plain}")):
                self.used_patterns.add(pattern)
                return value
        return default


def read_configs(metadata: dict[str, str], config: bytes | None) -> dict[str, PeftConfig]:
    """What peft noted, by component; "" is a config for all of them. Raises METADATA_INVALID."""
    if _METADATA_KEY in metadata:
        fields = _parsed(metadata[_METADATA_KEY], _METADATA_KEY)
        components = {name.split(".", 1)[0] for name in fields if "." in name}
        return {component: _peft_config(_METADATA_KEY, _below(fields, component)) for component in components} or {
            "": _peft_config(_METADATA_KEY, fields)
        }
    if config is not None:
        return {"": _peft_config("adapter_config.json", _parsed(config, "adapter_config.json"))}
    return {}


def scaling_of(key: str, path: str, rank: int, alpha: float | None, config: PeftConfig | None) -> float:
    """The factor that is folded into B of the module `path`. Raises ALPHA_INVALID or ALPHA_CONFLICT."""
    noted = config.alpha_of(path) if config else None
    noted_rank = config.rank_of(path) if config else None
    where = config.where if config else ""
    if noted_rank is not None and noted_rank != rank:
        raise rejected(Cause.ALPHA_CONFLICT, f"{key!r} has rank {rank}, {where} says {noted_rank:g}.", key)
    for value in (alpha, noted):
        if value is not None and not (math.isfinite(value) and value > 0):
            hint = " To some trainers 0 means alpha = rank, to others no effect." if value == 0 else ""
            raise rejected(Cause.ALPHA_INVALID, f"{key!r} has alpha {value}.{hint}", key)
    noted_scaling = noted / (math.sqrt(rank) if config and config.use_rslora else rank) if noted else None
    if alpha is None:
        return 1.0 if noted_scaling is None else noted_scaling
    if noted_scaling is not None and not math.isclose(alpha / rank, noted_scaling, rel_tol=5e-3):
        message = f"{key!r} has scaling {alpha / rank:g} by its alpha, {noted_scaling:g} by {where}."
        raise rejected(Cause.ALPHA_CONFLICT, message, key)
    return alpha / rank


def scaling_of_whole(key: str, path: str, alpha: float | None, config: PeftConfig | None) -> float:
    """The factor of a difference whose factors tell no rank: a LoKr of two whole matrices, a full difference.

    To LyCORIS it is 1 whatever alpha says, to peft it is alpha / rank as with any other. Raises as `scaling_of`.
    """
    if config is None:
        return 1.0
    rank, noted = config.rank_of(path), config.alpha_of(path)
    if rank is None or noted is None or not (rank > 0 and noted > 0 and math.isfinite(noted / rank)):
        raise rejected(Cause.ALPHA_INVALID, f"{config.where} has rank {rank} and alpha {noted} for {key!r}.", key)
    if alpha is not None:
        message = f"{key!r} has an alpha as LyCORIS writes it, which has no meaning here, beside peft's {config.where}."
        raise rejected(Cause.ALPHA_CONFLICT, message, key)
    return noted / rank


def _parsed(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise rejected(Cause.METADATA_INVALID, f"{where} is no JSON.", where) from error
    if not isinstance(fields, dict):
        raise rejected(Cause.METADATA_INVALID, f"{where} is no JSON object.", where)
    return fields


def _below(fields: dict[str, Any], component: str) -> dict[str, Any]:
    prefix = f"{component}."
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


def _peft_config(where: str, fields: dict[str, Any]) -> PeftConfig:
    name = str(fields.get("peft_type") or "LORA").rpartition(".")[2]
    if name not in _ALGORITHMS:
        raise rejected(Cause.UNSUPPORTED_ALGORITHM, f"{where} says {name[:40]}, which is not applied here.", where)
    if name != "LORA":
        return PeftConfig(
            where=where,
            algorithm=_ALGORITHMS[name],
            rank=_number(where, "r", fields.get("r", _LYCORIS_DEFAULT)),
            alpha=_number(where, "alpha", fields.get("alpha", _LYCORIS_DEFAULT)),
            rank_pattern=_patterns(where, "rank_pattern", fields),
            alpha_pattern=_patterns(where, "alpha_pattern", fields),
        )
    if fields.get("use_dora"):
        raise rejected(Cause.UNSUPPORTED_ALGORITHM, f"{where} says DoRA, which is not applied here.", where)
    return PeftConfig(
        where=where,
        rank=_optional(where, "r", fields),
        alpha=_optional(where, "lora_alpha", fields),
        rank_pattern=_patterns(where, "rank_pattern", fields),
        alpha_pattern=_patterns(where, "alpha_pattern", fields),
        use_rslora=bool(fields.get("use_rslora")),
    )


def _patterns(where: str, name: str, fields: dict[str, Any]) -> dict[str, float]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict):
        raise rejected(Cause.METADATA_INVALID, f"{where} has a {name} that is no table.", where)
    for pattern in patterns:
        # A file's regular expressions are not run: one can be made to never end.
        if not _PLAIN_PATTERN.fullmatch(pattern):
            message = f"{where} has a {name} {pattern[:100]!r} that is no plain module name."
            raise rejected(Cause.METADATA_INVALID, message, where)
    return {pattern: _number(where, pattern, value) for pattern, value in patterns.items()}


def _optional(where: str, name: str, fields: dict[str, Any]) -> float | None:
    return None if fields.get(name) is None else _number(where, name, fields[name])


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise rejected(Cause.METADATA_INVALID, f"{where} has a {name[:100]} that is no number.", where)
