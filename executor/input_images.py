"""From the bytes of an image file that a caller sent to a picture of the size that is generated.

The bytes are hostile until proven otherwise: only PNG, JPEG and WebP are decoded, and only when the size in the file's
header is allowed. Every failure is an InvalidRequest that names the field.
"""

import hashlib
import io
import struct
import zlib
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageOps

from loraplex.errors import InvalidRequest

Field = Literal["initial_image", "mask_image"]
Size = tuple[int, int]  # width and height in pixels

_FORMATS = ("PNG", "JPEG", "WEBP")
_DAMAGE = (
    *(OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, OverflowError, AttributeError),
    *(struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning),
)


@dataclass(frozen=True)
class InputImages:
    """The pictures of a request, scaled to one size: RGB and, for inpainting, L."""

    initial: Image.Image
    mask: Image.Image | None
    initial_sha256: str
    mask_sha256: str


def decode(initial: bytes, mask: bytes, size: Size, max_pixels: int) -> InputImages:
    """Decode and scale; `mask` may be empty. Blocks for as long as decoding takes. Raises InvalidRequest."""
    picture = _flattened(_opened(initial, "initial_image", max_pixels))
    painted = _mask(_opened(mask, "mask_image", max_pixels)) if mask else None
    if painted and painted.size != picture.size:
        raise InvalidRequest(
            f"mask_image is {_said(painted.size)}, initial_image is {_said(picture.size)}.",
            field="mask_image",
            remedy="Send both in the same size.",
        )
    return InputImages(
        initial=picture.resize(size, Image.Resampling.LANCZOS),
        mask=_not_black(painted.resize(size, Image.Resampling.NEAREST)) if painted else None,
        initial_sha256=hashlib.sha256(initial).hexdigest(),
        mask_sha256=hashlib.sha256(mask).hexdigest() if mask else "",
    )


def _opened(file: bytes, field: Field, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(file), formats=_FORMATS)
        _check_header(image, field, max_pixels)
        image.load()
        return ImageOps.exif_transpose(image)
    except _DAMAGE as error:
        raise InvalidRequest(
            f"{field} cannot be decoded: {type(error).__name__}.",
            field=field,
            remedy="Send a whole PNG, JPEG or WebP file of a usual size.",
        ) from error


def _check_header(image: Image.Image, field: Field, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise InvalidRequest(
            f"{field} is {_said(image.size)}; this executor takes at most {max_pixels} pixels.",
            field=field,
            remedy="Make it smaller: it is scaled to the size of the result anyway.",
        )
    # A JPEG may carry further pictures behind its own (MPO, of many phones); they are not frames.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise InvalidRequest(f"{field} is an animation.", field=field, remedy="Send one frame of it.")


def _flattened(image: Image.Image) -> Image.Image:
    image = _eight_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, rgba).convert("RGB")


def _mask(image: Image.Image) -> Image.Image:
    image = _eight_bits(image)
    if image.has_transparency_data:
        if image.convert("RGBA").getchannel("A").getextrema()[0] != 255:
            raise InvalidRequest(
                "mask_image is transparent in places, which may mean either that they are painted or that they stay.",
                field="mask_image",
                remedy="Send it without transparency: white is painted anew, black stays.",
            )
        image = image.convert("RGB")
    return image.convert("L")


def _eight_bits(image: Image.Image) -> Image.Image:
    # Pillow's own conversion cuts 16-bit greys off at 255 instead of scaling them.
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda grey: grey * (255 / 65535) + 0.5).convert("L")


def _not_black(mask: Image.Image) -> Image.Image:
    if mask.getbbox() is None:
        raise InvalidRequest(
            "mask_image is black everywhere, so nothing would be painted.",
            field="mask_image",
            remedy="Make white what is to be painted anew.",
        )
    return mask


def _said(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
