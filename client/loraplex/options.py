"""What a caller may ask of a generation, and how that becomes a request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from typing_extensions import TypedDict

from loraplex.checks import check_text
from loraplex.errors import InvalidRequest
from loraplex.events import FORMAT_TO_WIRE, OutputFormat
from loraplex.input_images import InputImage, image_file
from loraplex.pack_options import EXACTLY, PackOptions
from loraplex.v1 import executor_pb2

Priority = Literal["low", "normal", "high"]

_PRIORITIES: dict[Priority, "executor_pb2.Priority.ValueType"] = {
    "low": executor_pb2.PRIORITY_LOW,
    "normal": executor_pb2.PRIORITY_NORMAL,
    "high": executor_pb2.PRIORITY_HIGH,
}


@dataclass(frozen=True)
class AdapterSelection:
    """One adapter of a request."""

    ref: str
    strength: float = 1.0
    """1.0 is as trained; may be 0 or negative."""
    start: float = 0.0
    """Step i of n (from 0) sees the adapter from start <= i / n on; text encoders only when start is 0."""
    end: float = 1.0
    """Step i of n (from 0) sees the adapter while i / n < end."""
    components: tuple[str, ...] = ()
    """Apply it to these alone, as in "text_encoder"; () for all that the file adapts."""
    options: PackOptions = EXACTLY
    """How the file may be fitted to the base model."""

    def to_proto(self) -> executor_pb2.AdapterSelection:
        """The wire form. InvalidRequest for a value that is not of its type."""
        try:
            return executor_pb2.AdapterSelection(
                ref=self.ref,
                strength=self.strength,
                start=self.start,
                end=None if self.end == 1 else self.end,
                components=[self.components] if isinstance(self.components, str) else self.components,
                options=self.options.to_proto(),
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{self} cannot be sent: {error}", remedy="Look at the types of AdapterSelection.", field="adapters"
            ) from error


Name = TypeVar("Name", bound=str)
Wire = TypeVar("Wire")
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
    num_frames: int | None
    """Frames of a video, for a base that makes videos."""
    initial_image: InputImage | None
    """An image to start from: a PIL image, a path, or the bytes of a file; scaled to width x height."""
    mask_image: InputImage | None
    """Where `initial_image` is painted anew: white is replaced, black kept."""
    image_strength: float | None
    """How far `initial_image` is changed, above 0 and up to 1; fewer steps are run below 1."""
    preview_every_steps: int | None
    """A Preview event after every so many steps."""
    priority: Priority
    """"low", "normal" (default) or "high": who goes first when not all can."""
    output_format: OutputFormat
    """"png" (default), "jpeg" or "webp", each with what made the image in its metadata."""
    timeout_s: float | None
    """Seconds until the call is given up; the client's own when left out."""
    request_id: str | None
    """Follows the request into the log lines of both services, and names it to `Client.cancel`; else made up."""


_NUMBERS = (
    "seed",
    "width",
    "height",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "num_images",
    "num_frames",
    "image_strength",
    "preview_every_steps",
)


def generate_request(prompt: str, options: GenerateOptions) -> executor_pb2.GenerateRequest:
    """The request of a prompt and options. TypeError for an unknown keyword, InvalidRequest for a value of no use."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"generate() got unexpected keywords: {', '.join(sorted(unknown))}")
    request = executor_pb2.GenerateRequest(
        prompt=check_text(prompt, "prompt"),
        negative_prompt=check_text(options.get("negative_prompt", ""), "negative_prompt"),
        adapters=[selection.to_proto() for selection in selections(options.get("adapters", ()))],
        output_format=_one_of(FORMAT_TO_WIRE, options.get("output_format", "png"), "output_format"),
    )
    if "priority" in options:
        request.priority = _one_of(_PRIORITIES, options["priority"], "priority")
    for name in _NUMBERS:
        _set_number(request, name, options.get(name))
    if (initial := options.get("initial_image")) is not None:
        request.initial_image = image_file(initial, "initial_image")
    if (mask := options.get("mask_image")) is not None:
        request.mask_image = image_file(mask, "mask_image")
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


def _one_of(known: Mapping[Name, Wire], name: Name, field: str) -> Wire:
    if name not in known:
        raise InvalidRequest(
            f"{field} {name!r} is not known.", remedy=f"Use one of {', '.join(map(str, known))}.", field=field
        )
    return known[name]


def _set_number(request: executor_pb2.GenerateRequest, name: str, value: object) -> None:
    if value is None:
        return
    try:
        setattr(request, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{name} cannot be {value!r}: {error}", remedy="Give another number.", field=name
        ) from error
