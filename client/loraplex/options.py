"""What a caller may ask of a generation, and how that becomes a request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from typing_extensions import TypedDict

from loraplex.errors import InvalidRequest
from loraplex.events import FORMAT_TO_WIRE, OutputFormat
from loraplex.v1 import executor_pb2


@dataclass(frozen=True)
class AdapterSelection:
    """One adapter of a request; strength 1.0 is as trained, and it may be 0 or negative."""

    ref: str
    strength: float = 1.0


Adapters = str | Mapping[str, float] | Iterable[str | tuple[str, float] | AdapterSelection]


class GenerateOptions(TypedDict, total=False):
    """The keywords of `Client.generate` and `Client.generate_image`. What is left out takes the executor's default."""

    adapters: Adapters
    """`{"sketch": 0.8}`, `["sketch", ("org/name@rev:file", 0.5)]`, AdapterSelections, or one reference."""
    negative_prompt: str
    """What the image must not show; Flux needs `true_cfg_scale` above 1 for it."""
    seed: int | None
    """Seed of the initial noise; image i uses seed + i. Random when left out, and told with every image."""
    width: int | None
    """Width in pixels; with height one of the resolutions of `Client.model`."""
    height: int | None
    """Height in pixels."""
    num_inference_steps: int | None
    """Number of denoising steps."""
    guidance_scale: float | None
    """As diffusers' pipeline of the model defines it."""
    true_cfg_scale: float | None
    """True classifier-free guidance, where the pipeline has it; off at 1."""
    num_images: int | None
    """How many images; 1 by default."""
    output_format: OutputFormat
    """"png" (default, with the parameters in its text chunks), "jpeg" or "webp"."""
    timeout_s: float | None
    """Seconds until the call is given up; the client's own when left out."""
    request_id: str | None
    """Follows the request into the log lines of both services; made up when left out."""


_NUMBERS = (
    "seed",
    "width",
    "height",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "num_images",
)


def generate_request(prompt: str, options: GenerateOptions) -> executor_pb2.GenerateRequest:
    """The request of a prompt and options. TypeError for an unknown keyword, InvalidRequest for a value of no use."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"generate() got unexpected keywords: {', '.join(sorted(unknown))}")
    output_format = options.get("output_format", "png")
    if output_format not in FORMAT_TO_WIRE:
        formats = ", ".join(FORMAT_TO_WIRE)
        raise InvalidRequest(
            f"output_format {output_format!r} is not known.", remedy=f"Use one of {formats}.", field="output_format"
        )
    request = executor_pb2.GenerateRequest(
        prompt=prompt,
        negative_prompt=options.get("negative_prompt", ""),
        adapters=[
            executor_pb2.AdapterSelection(ref=selection.ref, strength=selection.strength)
            for selection in selections(options.get("adapters", ()))
        ],
        output_format=FORMAT_TO_WIRE[output_format],
    )
    for name in _NUMBERS:
        _set_number(request, name, options.get(name))
    return request


def selections(adapters: Adapters) -> list[AdapterSelection]:
    """The adapters of any accepted form, in order."""
    if isinstance(adapters, str):
        return [AdapterSelection(adapters)]
    if isinstance(adapters, Mapping):
        return [AdapterSelection(ref, strength) for ref, strength in adapters.items()]
    return [_selection(adapter) for adapter in adapters]


def _selection(adapter: str | tuple[str, float] | AdapterSelection) -> AdapterSelection:
    if isinstance(adapter, AdapterSelection):
        return adapter
    if isinstance(adapter, str):
        return AdapterSelection(adapter)
    ref, strength = adapter
    return AdapterSelection(ref, strength)


def _set_number(request: executor_pb2.GenerateRequest, name: str, value: object) -> None:
    if value is None:
        return
    try:
        setattr(request, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{name} cannot be {value!r}: {error}", remedy="Give another number.", field=name
        ) from error
