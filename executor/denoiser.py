"""The shared denoiser: calls of several running pipelines as one batch, and the slices handed back.

A running pipeline believes that it calls its own model. `intercept` puts a hand-off in place of the model's method: the
call becomes a ModelCall for the device thread, and the pipeline's thread waits for the result.
"""

import inspect
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

HandOff = Callable[["Method", dict[str, Any]], Any]


@dataclass(frozen=True)
class Method:
    """A method of a component as it was before it was intercepted."""

    component: str
    function: Callable[..., Any]
    batched: frozenset[str]  # arguments to cut and join along their first dimension; empty: calls run alone


def intercept(model: nn.Module, name: str, method: Method, hand_off: HandOff) -> None:
    """From now on `model.name(...)` is `hand_off(method, arguments by name)`.

    A method that runs alone keeps its positional arguments: some of diffusers' do not tell their names.
    """
    signature = inspect.signature(getattr(model, name))

    def handed_off(*args: Any, **kwargs: Any) -> Any:
        if method.batched:
            return hand_off(method, _by_name(signature, args, kwargs))
        return hand_off(replace(method, function=partial(method.function, *args)), kwargs)

    setattr(model, name, handed_off)


def _by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


@dataclass
class ModelCall:
    """One call of a running pipeline `run`, waiting for the device."""

    run: Any
    method: Method
    arguments: dict[str, Any]
    arrived: float = field(default_factory=time.monotonic)
    done: int = 0
    result: Future[Any] = field(default_factory=Future)
    _outputs: list[torch.Tensor] = field(default_factory=list)

    @cached_property
    def size(self) -> int:
        """Samples of the whole call: the first dimension of its batched arguments."""
        return len(next(value for name, value in self.arguments.items() if self.is_batched(name, value)))

    @property
    def samples_left(self) -> int:
        """Samples of the call that have not run yet."""
        return self.size - self.done

    @cached_property
    def key(self) -> Hashable:
        """Equal for calls that can share a batch: shapes and dtypes of batched arguments, the rest by value."""
        return tuple(
            (name, tuple(value.shape[1:]), value.dtype) if self.is_batched(name, value) else (name, _by_value(value))
            for name, value in sorted(self.arguments.items())
        )

    def cut(self, count: int) -> dict[str, Any]:
        """The arguments of the next `count` samples."""
        return {
            name: value[self.done : self.done + count] if self.is_batched(name, value) else value
            for name, value in self.arguments.items()
        }

    def deliver(self, output: torch.Tensor) -> None:
        """Take the output of the next samples; when all are there, the pipeline's thread goes on."""
        self._outputs.append(output)
        self.done += len(output)
        if self.done == self.size:
            self.result.set_result((torch.cat(self._outputs),))

    def is_batched(self, name: str, value: Any) -> bool:
        """Whether this argument has a row per sample."""
        return name in self.method.batched and isinstance(value, torch.Tensor)


def run_batch(shares: Sequence[tuple[ModelCall, int]]) -> None:
    """Run `count` samples of each call, which all have the same key, as one batch, and deliver the outputs.

    The method must return a tuple whose first element has a row per sample, as diffusers' denoisers do with
    return_dict=False.
    """
    cuts = [call.cut(count) for call, count in shares]
    first = shares[0][0]
    joined = {
        name: torch.cat([cut[name] for cut in cuts]) if first.is_batched(name, value) else value
        for name, value in cuts[0].items()
    }
    output = first.method.function(**joined)[0]
    for (call, _), part in zip(shares, output.split([count for _, count in shares]), strict=True):
        call.deliver(part)


def _by_value(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(value, Mapping):
        return tuple((key, _by_value(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, Hashable) else id(value)
