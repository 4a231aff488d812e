"""The shared denoiser: calls of several running pipelines as one batch, and the slices handed back.

A running pipeline believes that it calls its own model. `intercept` puts a hand-off in place of the model's method: the
call becomes a ModelCall for the device thread, and the pipeline's thread waits for the result.
"""

import inspect
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from executor.arguments import Arguments, Batching, by_name, nested

HandOff = Callable[["Method", dict[str, Any]], Any]


@dataclass(frozen=True)
class Method:
    """A method of a component as it was before it was intercepted."""

    component: str
    function: Callable[..., Any]
    batching: Batching | None = None  # how calls are cut and joined; without it they run alone

    @property
    def batched(self) -> bool:
        """Whether its calls may share a batch."""
        return self.batching is not None


def intercept(model: nn.Module, name: str, method: Method, hand_off: HandOff) -> None:
    """From now on `model.name(...)` is `hand_off(method, arguments by name)`.

    A method that runs alone keeps its positional arguments: some of diffusers' do not tell their names.
    """
    signature = inspect.signature(getattr(model, name))

    def handed_off(*args: Any, **kwargs: Any) -> Any:
        if method.batched:
            return hand_off(method, by_name(signature, args, kwargs))
        return hand_off(replace(method, function=partial(method.function, *args)), kwargs)

    setattr(model, name, handed_off)


class Output(tuple[torch.Tensor]):
    """What a pipeline gets: diffusers' denoisers give a tuple or an object with `sample`, and this is both."""

    @property
    def sample(self) -> torch.Tensor:
        """The only item."""
        return self[0]


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
    def leaves(self) -> Arguments:
        """The arguments of a call that may share a batch, as it runs them: flat, of fixed shapes."""
        assert self.method.batching
        return self.method.batching.prepare(self.arguments)

    @cached_property
    def size(self) -> int:
        """Samples of the whole call."""
        assert self.method.batching
        return self.method.batching.size(self.leaves)

    @property
    def samples_left(self) -> int:
        """Samples of the call that have not run yet."""
        return self.size - self.done

    @cached_property
    def key(self) -> Any:
        """Equal for calls that can share a batch."""
        assert self.method.batching
        return self.method.component, self.method.batching.key(self.leaves)

    def cut(self, count: int) -> Arguments:
        """The arguments of the next `count` samples."""
        assert self.method.batching
        return self.method.batching.cut(self.leaves, self.done, self.done + count)

    def deliver(self, output: torch.Tensor) -> None:
        """Take the output of the next samples; when all are there, the pipeline's thread goes on."""
        self._outputs.append(output)
        self.done += len(output)
        if self.done == self.size:
            self.result.set_result(Output([torch.cat(self._outputs)]))


def run_batch(shares: Sequence[tuple[ModelCall, int]]) -> None:
    """Run `count` samples of each call, which all have the same key, as one batch, and deliver the outputs.

    The method must return a tuple whose first element has a row per sample, as diffusers' denoisers do with
    return_dict=False.
    """
    method = shares[0][0].method
    assert method.batching
    joined = method.batching.join([call.cut(count) for call, count in shares])
    output = method.function(**nested(joined))[0]
    for (call, _), part in zip(shares, output.split([count for _, count in shares]), strict=True):
        call.deliver(part)
