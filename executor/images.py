"""From what the autoencoder decoded to the bytes of a file: images and previews."""

import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from executor.image_metadata import exif, made_by, text_chunks
from executor.jobs import AdapterReady, Parameters
from loraplex.errors import NonFiniteOutput

MAX_PREVIEW_SIDE = 256  # pixels


def check_finite(decoded: Any, parameters: Parameters) -> None:
    """Raise NonFiniteOutput for an autoencoder's output, as diffusers returns it, with an infinity or a NaN in it.

    Waits for the device.
    """
    pixels = decoded[0]
    if not isinstance(pixels, torch.Tensor) or bool(torch.isfinite(pixels).all()):
        return
    refs = ", ".join(f"{choice.ref} at {choice.strength:g}" for choice in parameters.adapters)
    raise NonFiniteOutput(
        f"The image came out as numbers that are not finite, with {refs or 'no adapter'}.",
        field="adapters" if refs else "",
        remedy="Lower the strength, or use another adapter: this one asks for more than the model's dtype holds."
        if refs
        else "Use an executor with dtype BF16 or F32.",
    )


def encode(
    image: Image.Image, parameters: Parameters, adapters: Sequence[AdapterReady], seed: int, frame: int = 0
) -> bytes:
    """The image in the job's format, with what made it in its metadata unless the job has them off."""
    target = io.BytesIO()
    described = made_by(parameters, adapters, seed, frame) if parameters.metadata else None
    if parameters.image_format == "PNG":
        image.save(target, "PNG", pnginfo=text_chunks(described) if described else None)
    elif parameters.image_format == "JPEG":
        image.save(target, "JPEG", quality=95, exif=exif(described) if described else b"")
    else:
        image.save(target, "WEBP", lossless=True, exif=exif(described) if described else b"")
    return target.getvalue()


def encode_preview(image: Image.Image) -> bytes:
    """A JPEG of at most MAX_PREVIEW_SIDE pixels a side: some kilobytes, whatever the image is."""
    small = image.convert("RGB")
    small.thumbnail((MAX_PREVIEW_SIDE, MAX_PREVIEW_SIDE), Image.Resampling.BILINEAR)
    target = io.BytesIO()
    small.save(target, "JPEG", quality=75)
    return target.getvalue()
