"""The arguments of a denoiser's call: which of them have a row per sample, how calls are cut and joined along those.

Arguments are held flat: `added_cond_kwargs.time_ids` is the tensor `time_ids` in the mapping `added_cond_kwargs`.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Arguments = dict[str, Any]


def by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments of a call of a function by name, however it was written. Raises TypeError when they do not fit."""
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


def flat(arguments: Mapping[str, Any], prefix: str = "") -> Arguments:
    """The arguments with those inside of mappings by dotted names. Empty mappings stay."""
    leaves: Arguments = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flat(value, f"{prefix}{name}."))
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def nested(leaves: Arguments) -> Arguments:
    """The reverse of `flat`."""
    arguments: Arguments = {}
    for path, value in leaves.items():
        *outer, name = path.split(".")
        inner = arguments
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = value
    return arguments


@dataclass(frozen=True)
class Batching:
    """What is known of the calls of one denoiser; `executor.probe` finds it out."""

    batched: frozenset[str]  # a row per sample
    same: frozenset[str] = frozenset()  # a row per sample in shape, but the model reads one for the whole batch
    spread: frozenset[str] = frozenset()  # one number per call that the model takes per sample as well
    fix: Callable[[Arguments], Arguments] | None = None  # to fixed shapes; see `executor.fixed_shapes`

    def prepare(self, arguments: Mapping[str, Any]) -> Arguments:
        """The flat arguments as they are run."""
        return self.spread_out(self.fixed(arguments))

    def fixed(self, arguments: Mapping[str, Any]) -> Arguments:
        """The flat arguments, of fixed shapes; what is returned is the same whichever way a pipeline asks for it."""
        return flat(self.fix(dict(arguments)) if self.fix else arguments) | {"return_dict": False}

    def spread_out(self, leaves: Arguments) -> Arguments:
        """The arguments with what is spread given once for every sample."""
        size = self.size(leaves)
        return {
            path: value.reshape(1).expand(size) if path in self.spread and value.numel() == 1 else value
            for path, value in leaves.items()
        }

    def size(self, leaves: Arguments) -> int:
        """Samples of a call."""
        return len(next(value for path, value in leaves.items() if path in self.batched and _is_tensor(value)))

    def key(self, leaves: Arguments) -> Hashable:
        """Equal for calls that can share a batch: shapes and dtypes of what has a row per sample, the rest by value."""
        return tuple((path, self._key(path, value)) for path, value in sorted(leaves.items()))

    def cut(self, leaves: Arguments, start: int, stop: int) -> Arguments:
        """The arguments of some samples."""
        return {path: value[start:stop] if self._has_rows(path, value) else value for path, value in leaves.items()}

    def join(self, cuts: Sequence[Arguments]) -> Arguments:
        """The arguments of one call for the samples of all `cuts`, whose calls have the same key."""
        return {
            # One memory layout, whatever the pipelines' was: compiled code depends on it.
            path: torch.cat([cut[path] for cut in cuts]).contiguous() if self._has_rows(path, value) else value
            for path, value in cuts[0].items()
        }

    def _has_rows(self, path: str, value: Any) -> bool:
        return _is_tensor(value) and (path in self.batched or path in self.same or path in self.spread)

    def _key(self, path: str, value: Any) -> Hashable:
        if not self._has_rows(path, value):
            return by_value(value)
        if path in self.same:
            return by_value(torch.unique(value, dim=0))
        return tuple(value.shape[1:]), value.dtype


def by_value(value: Any) -> Hashable:
    """Equal for equal values; for what cannot be compared, equal for the same object only."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(value, Mapping):
        return tuple((key, by_value(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return (type(value), *(by_value(item) for item in value))
    return value if isinstance(value, Hashable) else id(value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
