"""What a denoiser does with the arguments of its calls, found out by running the loaded pipeline a few times.

One image and two images tell which arguments have a row per sample. Changing one sample of a call tells whether the
model reads that row for that sample alone, which is what batches of different jobs rest on. The same runs tell which
layers see something else than the batch in their first dimension.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from PIL import Image
from torch import nn

from executor.arguments import Arguments, Batching, by_value, nested
from executor.denoiser import Method, Output, intercept
from executor.errors import UnsupportedModel
from executor.jobs import Mode
from executor.pipeline import BasePipeline

_SHORT, _LONG = "cat", "cat on a table"
_log = structlog.stdlib.get_logger("loraplex.executor")


@dataclass(frozen=True)
class Findings:
    """What is needed to batch the calls and to attach rank rows."""

    batching: dict[str, Batching]  # by denoiser
    folded: frozenset[str] = frozenset()  # paths of layers whose first dimension is samples x something
    excluded: frozenset[str] = frozenset()  # paths of layers in which no sample can be told from another
    modes: frozenset[Mode] = frozenset()  # from an image, whose calls are like those from a prompt alone


@dataclass
class _Call:
    leaves: Arguments
    output: torch.Tensor
    layers: dict[str, list["_Seen"]]


@dataclass(frozen=True)
class _Seen:
    length: int  # of the first dimension
    norms: torch.Tensor  # of its rows: enough to recognise a sample


def probe(base: BasePipeline, width: int, height: int) -> Findings:
    """Run the pipeline at this size. Raises UnsupportedModel when calls of different jobs could not share a batch."""
    with torch.no_grad():
        one = _first_calls(base, width, height, 1, _SHORT)
        two = _first_calls(base, width, height, 2, _SHORT)
        long = _first_calls(base, width, height, 1, _LONG)
        batching: dict[str, Batching] = {}
        folded: set[str] = set()
        excluded: set[str] = set()
        for name in base.family.denoisers:
            if name not in one or name not in two or name not in long:
                raise UnsupportedModel(f"{base.family_name} did not call {name} in a short run.")
            _check_text(name, one[name], long[name])
            guess, samples = _rows(name, one[name].leaves, two[name].leaves)
            guess = replace(guess, fix=base.batching[name].fix)
            batching[name] = _tried(name, base.forwards[name], two[name], guess)
            for path, kind in _layer_kinds(one[name], two[name], samples).items():
                (folded if kind == "folded" else excluded).add(f"{name}.{path}")
        base.batching = batching
        modes = frozenset(mode for mode in base.with_image if _is_alike(base, mode, width, height, one))
    if excluded:
        _log.warning("no adapter can modify these layers, which mix samples", layers=sorted(excluded))
    return Findings(batching, frozenset(folded), frozenset(excluded), modes)


def _is_alike(base: BasePipeline, mode: Mode, width: int, height: int, expected: dict[str, _Call]) -> bool:
    """Whether a mode runs the graphs that are compiled anyway."""
    parameters = replace(
        base.example(width, height, num_images=1, prompt=_SHORT),
        initial_image=Image.new("RGB", (width, height), "gray"),
        mask_image=Image.new("L", (width, height), 255) if mode == "inpaint" else None,
        image_strength=1.0,
    )
    try:
        with _recording(base) as calls:
            base.generate(parameters, lambda step: None, lambda step, previews: None)
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        _log.warning("mode is not served: the pipeline for it fails", mode=mode, error=str(error))
        return False
    different = [
        f"{name}.{path}"
        for name, call in expected.items()
        for path in {**call.leaves, **calls[name].leaves}
        if _shape(call.leaves.get(path)) != _shape(calls[name].leaves.get(path))
    ]
    if different:
        _log.warning("mode is not served: its calls have other shapes", mode=mode, arguments=different)
    return not different


def _shape(value: Any) -> Any:
    return (value.shape[1:], value.dtype) if isinstance(value, torch.Tensor) else by_value(value)


def _first_calls(base: BasePipeline, width: int, height: int, num_images: int, prompt: str) -> dict[str, _Call]:
    with _recording(base) as calls:
        parameters = base.example(width, height, num_images=num_images, prompt=prompt)
        images = base.generate(parameters, lambda step: None, lambda step, previews: None)
    if images[0].size != (width, height) or len(images) != num_images * base.num_frames:
        raise UnsupportedModel(
            f"{base.family_name} made {len(images)} pictures of {images[0].width}x{images[0].height} "
            f"when asked for {num_images} x {base.num_frames} of {width}x{height}."
        )
    return calls


@contextmanager
def _recording(base: BasePipeline) -> Iterator[dict[str, _Call]]:
    calls: dict[str, _Call] = {}
    for name, denoiser in base.denoisers.items():
        forward = base.forwards[name]

        def hand_off(method: Method, arguments: Arguments, denoiser: nn.Module = denoiser) -> Any:
            assert method.batching
            leaves = method.batching.fixed(arguments)
            with _watching_layers(denoiser) as layers:
                output = method.function(**nested(leaves))[0]
            if not isinstance(output, torch.Tensor):
                raise UnsupportedModel(f"{method.component} gives a {type(output).__name__} instead of a tensor.")
            calls.setdefault(method.component, _Call(leaves, output, layers))
            return Output([output])

        intercept(denoiser, "forward", Method(name, forward, base.batching[name]), hand_off)
    try:
        yield calls
    finally:
        for denoiser in base.denoisers.values():
            del denoiser.forward  # the instance's; that of the class is back


@contextmanager
def _watching_layers(denoiser: nn.Module) -> Iterator[dict[str, list[_Seen]]]:
    seen: dict[str, list[_Seen]] = {}

    def watch(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            seen.setdefault(path, []).append(_Seen(len(x), x.float().flatten(1).norm(dim=1)))

        return hook

    layers = [(path, module) for path, module in denoiser.named_modules() if type(module) in (nn.Linear, nn.Conv2d)]
    hooks = [module.register_forward_pre_hook(watch(path)) for path, module in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _check_text(name: str, short: _Call, long: _Call) -> None:
    for path, value in short.leaves.items():
        other = long.leaves.get(path)
        if isinstance(value, torch.Tensor) and getattr(other, "shape", None) != value.shape:
            raise UnsupportedModel(
                f"The argument {path} of {name} changes shape with the prompt, from {tuple(value.shape)} to "
                f"{tuple(getattr(other, 'shape', ()))}: every prompt would be compiled anew."
            )


def _rows(name: str, one: Arguments, two: Arguments) -> tuple[Batching, int]:
    """Which arguments grow with the number of images, and the samples of a call for one image."""
    if one.keys() != two.keys():
        raise UnsupportedModel(f"{name} has other arguments for two images than for one.")
    sizes: dict[str, int] = {}
    for path, value in one.items():
        other = two[path]
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if value.shape == other.shape:
                continue
            if value.shape[1:] == other.shape[1:] and len(other) == 2 * len(value):
                sizes[path] = len(value)
                continue
        elif by_value(value) == by_value(other):
            continue
        raise UnsupportedModel(f"The argument {path} of {name} is neither one per sample nor the same for all.")
    if len(set(sizes.values())) != 1:
        raise UnsupportedModel(f"No samples can be told apart in the arguments of {name}: {sizes}.")
    single = {path for path, value in one.items() if isinstance(value, torch.Tensor) and _is_single(value, two[path])}
    return Batching(frozenset(sizes), spread=frozenset(single)), next(iter(sizes.values()))


def _is_single(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.shape == other.shape and value.ndim <= 1 and value.numel() == 1


def _tried(name: str, forward: Callable[..., Any], call: _Call, guess: Batching) -> Batching:
    """`guess` as far as running the model bears it out."""
    spread = frozenset(path for path in guess.spread if _takes_rows(forward, call, guess, path))
    guess = replace(guess, spread=spread)
    leaves = guess.spread_out(call.leaves)
    expected = forward(**nested(leaves))[0]
    same: set[str] = set()
    for path in sorted(guess.batched | spread):
        changed = forward(**nested({**leaves, path: _with_last_changed(leaves[path])}))[0]
        if not _close(changed[:-1], expected[:-1]):
            raise UnsupportedModel(f"A sample's {path} changes what {name} makes of the other samples.")
        if torch.equal(changed[-1], expected[-1]):
            same.add(path)  # the model reads the first sample's, or none
    batched = guess.batched - same
    if not batched:
        raise UnsupportedModel(f"{name} reads none of its arguments sample by sample.")
    return replace(guess, batched=batched, spread=spread - same, same=frozenset(same - spread))


def _takes_rows(forward: Callable[..., Any], call: _Call, guess: Batching, path: str) -> bool:
    one = replace(guess, spread=frozenset({path}))
    try:
        output = forward(**nested(one.spread_out(call.leaves)))[0]
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return output.shape == call.output.shape and _close(output, call.output)


def _with_last_changed(value: torch.Tensor) -> torch.Tensor:
    changed = value.clone()
    last = changed[-1]
    if value.dtype == torch.bool:
        changed[-1] = ~last
    elif value.is_floating_point():
        changed[-1] = torch.where(last == 0, 1.0, last * 0.5)
    else:
        changed[-1] = torch.where(last > 0, last - 1, last + 1)
    return changed


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = 1e-5 if one.dtype == torch.float32 else 2e-2
    return bool((one.float() - other.float()).norm() <= tolerance * other.float().norm())


def _layer_kinds(one: _Call, two: _Call, samples: int) -> dict[str, str]:
    """The layers whose first dimension is not the batch: "folded", or "mixed" when samples cannot be found in it."""
    kinds: dict[str, str] = {}
    for path, seen in one.layers.items():
        pairs = list(zip(seen, two.layers[path], strict=True))
        if all(a.length == samples and b.length == 2 * samples for a, b in pairs):
            continue
        folds = all(a.length % samples == 0 and b.length == 2 * a.length and _same_start(a, b) for a, b in pairs)
        kinds[path] = "folded" if folds else "mixed"
    return kinds


def _same_start(one: _Seen, two: _Seen) -> bool:
    """Whether two images begin with all of what one image is, so that samples stand one after the other."""
    return _close(two.norms[: one.length], one.norms)
