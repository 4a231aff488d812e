"""From the message of a request to checked parameters. The first wrong field is refused by name."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from executor.adapter_choices import check_adapters
from executor.config import ExecutorSettings
from executor.jobs import ImageFormat, Mode, Parameters
from loraplex.errors import InvalidRequest, TooManyRows
from loraplex.request_ids import is_request_id
from loraplex.v1 import executor_pb2 as pb

MAX_PROMPT_CHARACTERS = 10_000
MAX_SEED = 2**63 - 1

_FORMATS: dict[int, ImageFormat] = {
    pb.OUTPUT_FORMAT_UNSPECIFIED: "PNG",
    pb.OUTPUT_FORMAT_PNG: "PNG",
    pb.OUTPUT_FORMAT_JPEG: "JPEG",
    pb.OUTPUT_FORMAT_WEBP: "WEBP",
}


_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: 0,
    pb.PRIORITY_LOW: -1,
    pb.PRIORITY_NORMAL: 0,
    pb.PRIORITY_HIGH: 1,
}


@dataclass(frozen=True)
class Served:
    """What the base model can be asked for."""

    modes: frozenset[Mode]
    components: frozenset[str]  # that adapters modify
    image_strengths: Mapping[Mode, float]  # the default of image_strength, for every mode that has an initial image
    skipped_steps: Callable[[int, float], int]  # how many of so many steps an image of this image_strength saves
    previews: bool
    frames_multiple: int = 1  # a video has 1 frame more than a multiple of this


def check_request(request: pb.GenerateRequest, settings: ExecutorSettings, served: Served) -> Parameters:
    """Checked parameters, defaults filled in, all but the pictures. Raises InvalidRequest or TooManyRows.

    The first wrong field is named. Nothing is decoded here: see `executor.input_images`.
    """
    _check_texts(request)
    _check_number_of_adapters(request, settings.rows_per_sample)
    _check_image_sizes(request, settings.max_image_bytes)
    mode = _mode(request, served)
    num_images = _bounded(request, "num_images", 1, settings.max_num_images)
    width, height = _resolution(request, settings)
    num_inference_steps = _bounded(
        request, "num_inference_steps", settings.default_num_inference_steps, settings.max_num_inference_steps
    )
    image_strength = _image_strength(request, mode, served, num_inference_steps)
    skipped_steps = served.skipped_steps(num_inference_steps, image_strength) if image_strength else 0
    num_steps = num_inference_steps - skipped_steps
    return Parameters(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        adapters=check_adapters(request.adapters, served.components, num_steps),
        seed=_seed(request, num_images),
        width=width,
        height=height,
        num_inference_steps=num_inference_steps,
        guidance_scale=_scale(request, "guidance_scale", settings.default_guidance_scale),
        true_cfg_scale=_true_cfg_scale(request),
        num_images=num_images,
        image_format=_format(request),
        num_frames=_num_frames(request, mode, settings, served),
        image_strength=image_strength,
        skipped_steps=skipped_steps,
        preview_every_steps=_preview_every_steps(request, served, num_steps),
        metadata=settings.image_metadata,
    )


def check_priority(request: pb.GenerateRequest) -> int:
    """The priority as a number: 0 is normal, higher goes first. Raises InvalidRequest for one that is not known."""
    if request.priority not in _PRIORITIES:
        raise InvalidRequest(
            f"Priority {request.priority} is not known.", field="priority", remedy="Use LOW, NORMAL or HIGH."
        )
    return _PRIORITIES[request.priority]


def check_cancelled_id(request: pb.CancelRequest) -> str:
    """The id of the request to end. Raises InvalidRequest for one that no request can have."""
    if not is_request_id(request.request_id):
        raise InvalidRequest(
            "This is no request id.",
            field="request_id",
            remedy="Send the x-request-id of the call to end: 1 to 128 letters, digits, or ._:/+=@- characters.",
        )
    return request.request_id


def _check_texts(request: pb.GenerateRequest) -> None:
    if not request.prompt.strip():
        raise InvalidRequest("The prompt is empty.", field="prompt", remedy="Say what the image shows.")
    for field in ("prompt", "negative_prompt"):
        if len(getattr(request, field)) > MAX_PROMPT_CHARACTERS:
            raise InvalidRequest(
                f"{field} has more than {MAX_PROMPT_CHARACTERS} characters.", field=field, remedy="Shorten it."
            )


def _check_number_of_adapters(request: pb.GenerateRequest, rows_per_sample: int) -> None:
    if len(request.adapters) > rows_per_sample:  # none has less than one row, so nothing needs to be fetched to know
        raise TooManyRows(
            f"{len(request.adapters)} adapters need a rank row each; one image can use {rows_per_sample}.",
            field="adapters",
            remedy="Use fewer adapters.",
        )


def _mode(request: pb.GenerateRequest, served: Served) -> Mode:
    if not request.initial_image:
        _refuse_without_initial_image(request)
        return "text_to_image" if "text_to_image" in served.modes else "text_to_video"
    mode: Mode = "inpaint" if request.mask_image else "image_to_image"
    if mode not in served.modes:
        known = ", ".join(sorted(mode.replace("_", " ") for mode in served.modes))
        raise InvalidRequest(
            f"This base model has no {mode.replace('_', ' ')}.",
            field="mask_image" if "image_to_image" in served.modes else "initial_image",
            remedy=f"Leave the field out, or use another base model; this one has {known}.",
        )
    return mode


def _refuse_without_initial_image(request: pb.GenerateRequest) -> None:
    for field, is_set in {
        "mask_image": bool(request.mask_image),
        "image_strength": request.HasField("image_strength"),
    }.items():
        if is_set:
            raise InvalidRequest(
                f"{field} does nothing without initial_image.",
                field=field,
                remedy=f"Send initial_image too, or leave {field} out.",
            )


def _check_image_sizes(request: pb.GenerateRequest, max_bytes: int) -> None:
    for field in ("initial_image", "mask_image"):
        size = len(getattr(request, field))
        if size > max_bytes:
            raise InvalidRequest(
                f"{field} has {size} bytes; this executor takes at most {max_bytes}.",
                field=field,
                remedy="Make it smaller: it is scaled to the size of the result anyway.",
            )


def _num_frames(request: pb.GenerateRequest, mode: Mode, settings: ExecutorSettings, served: Served) -> int:
    if mode != "text_to_video":
        if request.HasField("num_frames"):
            raise InvalidRequest("This makes no video.", field="num_frames", remedy="Leave num_frames out.")
        return 1
    frames = _bounded(request, "num_frames", settings.default_num_frames, settings.max_num_frames)
    if (frames - 1) % served.frames_multiple:
        raise InvalidRequest(
            f"num_frames is {frames}.",
            field="num_frames",
            remedy=f"Use 1 more than a multiple of {served.frames_multiple}, up to {settings.max_num_frames}.",
        )
    return frames


def _image_strength(request: pb.GenerateRequest, mode: Mode, served: Served, num_inference_steps: int) -> float:
    if not request.initial_image:
        return 0.0
    strength = request.image_strength if request.HasField("image_strength") else served.image_strengths[mode]
    if not 0 < strength <= 1:  # not NaN either
        raise InvalidRequest(
            f"image_strength is {strength}.",
            field="image_strength",
            remedy="Use a number above 0 and up to 1, where 1 keeps nothing of the initial image.",
        )
    if served.skipped_steps(num_inference_steps, strength) >= num_inference_steps:
        raise InvalidRequest(
            f"At image_strength {strength} none of {num_inference_steps} steps is left.",
            field="image_strength",
            remedy="Raise image_strength or num_inference_steps: their product must be at least 1.",
        )
    return float(strength)


def _preview_every_steps(request: pb.GenerateRequest, served: Served, num_steps: int) -> int:
    every = request.preview_every_steps
    if every and not served.previews:
        raise InvalidRequest(
            "This base model has no previews.", field="preview_every_steps", remedy="Leave preview_every_steps out."
        )
    if not 0 <= every <= num_steps:
        raise InvalidRequest(
            f"preview_every_steps is {every}.",
            field="preview_every_steps",
            remedy=f"Use 1 to {num_steps}, the steps of this request, or 0 for no previews.",
        )
    return int(every)


def _seed(request: pb.GenerateRequest, num_images: int) -> int:
    if not request.HasField("seed"):
        return random.SystemRandom().randrange(2**31)
    if not 0 <= request.seed <= MAX_SEED - num_images:
        raise InvalidRequest(f"The seed {request.seed} is out of range.", field="seed", remedy="Use 0 or above.")
    return request.seed


def _resolution(request: pb.GenerateRequest, settings: ExecutorSettings) -> tuple[int, int]:
    width, height = settings.resolutions[0]
    asked = (
        request.width if request.HasField("width") else width,
        request.height if request.HasField("height") else height,
    )
    if asked not in settings.resolutions:
        served = ", ".join(f"{width}x{height}" for width, height in settings.resolutions)
        raise InvalidRequest(
            f"{asked[0]}x{asked[1]} is not served.",
            field="height" if asked[0] in {width for width, _ in settings.resolutions} else "width",
            remedy=f"Use one of {served}.",
        )
    return asked


def _bounded(request: pb.GenerateRequest, field: str, default: int, largest: int) -> int:
    value = getattr(request, field) if request.HasField(field) else default  # type: ignore[arg-type]
    if not 1 <= value <= largest:
        raise InvalidRequest(f"{field} is {value}.", field=field, remedy=f"Use 1 to {largest}.")
    return int(value)


def _scale(request: pb.GenerateRequest, field: str, default: float) -> float:
    value = float(getattr(request, field)) if request.HasField(field) else default  # type: ignore[arg-type]
    if not math.isfinite(value) or not 0 <= value <= 100:
        raise InvalidRequest(f"{field} is {value}.", field=field, remedy="Use 0 to 100.")
    return value


def _true_cfg_scale(request: pb.GenerateRequest) -> float:
    scale = _scale(request, "true_cfg_scale", 1.0)
    if scale < 1:  # diffusers would ignore it
        raise InvalidRequest(
            f"true_cfg_scale is {scale}.",
            field="true_cfg_scale",
            remedy="Use a number above 1 together with a negative prompt; 1, or nothing, is off.",
        )
    return scale


def _format(request: pb.GenerateRequest) -> ImageFormat:
    if request.output_format not in _FORMATS:
        raise InvalidRequest(
            f"Output format {request.output_format} is not known.",
            field="output_format",
            remedy="Use PNG, JPEG or WEBP.",
        )
    return _FORMATS[request.output_format]
