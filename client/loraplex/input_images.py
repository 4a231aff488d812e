"""An image that a request brings along: from what a caller has in hand to the bytes of a file."""

import io
import os
from pathlib import Path

import PIL.Image
import PIL.ImageOps

from loraplex.channel import MAX_IMAGE_BYTES
from loraplex.errors import InvalidRequest

InputImage = PIL.Image.Image | str | os.PathLike[str] | bytes
"""A PIL image, the path of a PNG, JPEG or WebP file, or the bytes of one."""

_NOT_IN_PNG = ("CMYK", "YCbCr", "LAB", "HSV")


def image_file(image: InputImage, field: str) -> bytes:
    """The bytes to send; a PIL image becomes a PNG. InvalidRequest, naming `field`, when there is nothing to send."""
    if isinstance(image, PIL.Image.Image):
        file = _png(image, field)
    elif isinstance(image, bytes):
        file = image
    else:
        file = _read(image, field)
    if not 0 < len(file) <= MAX_IMAGE_BYTES:
        raise InvalidRequest(
            f"{field} has {len(file)} bytes; 1 to {MAX_IMAGE_BYTES} can be sent.",
            field=field,
            remedy="Make it smaller: it is scaled to the size of the result anyway.",
        )
    return file


def _png(image: PIL.Image.Image, field: str) -> bytes:
    target = io.BytesIO()
    try:
        # Upright, as a viewer shows it and as the executor turns a file: PNG would lose the orientation.
        upright = PIL.ImageOps.exif_transpose(image)
        (upright.convert("RGB") if upright.mode in _NOT_IN_PNG else upright).save(target, "PNG")
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{field} cannot be sent: {error}", field=field, remedy="Convert it to RGB first, or to L for a mask."
        ) from error
    return target.getvalue()


def _read(path: str | os.PathLike[str], field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, TypeError) as error:
        raise InvalidRequest(
            f"{field} cannot be read: {error}", field=field, remedy="Give a PIL image, a path, or the bytes of a file."
        ) from error
