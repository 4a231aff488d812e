"""From the message of a request to checked parameters. The first wrong field is refused by name."""

import math
import random

from executor.config import ExecutorSettings
from executor.jobs import AdapterChoice, ImageFormat, Parameters
from loraplex.errors import InvalidRequest, TooManyRows
from loraplex.v1 import executor_pb2 as pb

MAX_PROMPT_CHARACTERS = 10_000
MAX_REF_CHARACTERS = 1_000
MAX_SEED = 2**63 - 1

_FORMATS: dict[int, ImageFormat] = {
    pb.OUTPUT_FORMAT_UNSPECIFIED: "PNG",
    pb.OUTPUT_FORMAT_PNG: "PNG",
    pb.OUTPUT_FORMAT_JPEG: "JPEG",
    pb.OUTPUT_FORMAT_WEBP: "WEBP",
}


def check_request(request: pb.GenerateRequest, settings: ExecutorSettings) -> Parameters:
    """Checked parameters, defaults filled in. Raises InvalidRequest or TooManyRows for the first wrong field."""
    _check_texts(request)
    _check_number_of_adapters(request, settings.rows_per_sample)
    num_images = _bounded(request, "num_images", 1, settings.max_num_images)
    width, height = _resolution(request, settings)
    return Parameters(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        adapters=_adapters(request),
        seed=_seed(request, num_images),
        width=width,
        height=height,
        num_inference_steps=_bounded(
            request, "num_inference_steps", settings.default_num_inference_steps, settings.max_num_inference_steps
        ),
        guidance_scale=_scale(request, "guidance_scale", settings.default_guidance_scale),
        true_cfg_scale=_scale(request, "true_cfg_scale", 1.0),
        num_images=num_images,
        image_format=_format(request),
    )


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


def _adapters(request: pb.GenerateRequest) -> tuple[AdapterChoice, ...]:
    choices: list[AdapterChoice] = []
    for position, selection in enumerate(request.adapters):
        field = f"adapters[{position}]"
        if not 0 < len(selection.ref.strip()) <= MAX_REF_CHARACTERS:
            raise InvalidRequest(
                f"An adapter needs a reference of 1 to {MAX_REF_CHARACTERS} characters.",
                field=f"{field}.ref",
                remedy="Name it, or leave the entry out.",
            )
        if selection.ref in (choice.ref for choice in choices):
            raise InvalidRequest(
                f"{selection.ref!r} is listed twice.",
                field=f"{field}.ref",
                remedy="List it once, with the strength that you want.",
            )
        strength = selection.strength if selection.HasField("strength") else 1.0
        if not math.isfinite(strength) or abs(strength) > 100:
            raise InvalidRequest(
                f"The strength {strength} is not within -100 to 100.",
                field=f"{field}.strength",
                remedy="1.0 is as trained.",
            )
        choices.append(AdapterChoice(selection.ref, strength))
    return tuple(choices)


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
    value = getattr(request, field) if request.HasField(field) else min(default, largest)  # type: ignore[arg-type]
    if not 1 <= value <= largest:
        raise InvalidRequest(f"{field} is {value}.", field=field, remedy=f"Use 1 to {largest}.")
    return int(value)


def _scale(request: pb.GenerateRequest, field: str, default: float) -> float:
    value = float(getattr(request, field)) if request.HasField(field) else default  # type: ignore[arg-type]
    if not math.isfinite(value) or not 0 <= value <= 100:
        raise InvalidRequest(f"{field} is {value}.", field=field, remedy="Use 0 to 100.")
    return value


def _format(request: pb.GenerateRequest) -> ImageFormat:
    if request.output_format not in _FORMATS:
        raise InvalidRequest(
            f"Output format {request.output_format} is not known.",
            field="output_format",
            remedy="Use PNG, JPEG or WEBP.",
        )
    return _FORMATS[request.output_format]
