"""Pictures that came with a request: decoded safely, or refused by field."""

import hashlib
import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from executor.input_images import InputImages, decode
from loraplex.errors import InvalidRequest

MAX_PIXELS = 10_000


def noise(width: int = 40, height: int = 20, mode: str = "RGB") -> Image.Image:
    """A picture without any pattern."""
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def file(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    """The picture as a file."""
    target = io.BytesIO()
    image.save(target, image_format, **options)
    return target.getvalue()


def decoded(initial: bytes, mask: bytes = b"", size: tuple[int, int] = (40, 20)) -> InputImages:
    return decode(initial, mask, size, MAX_PIXELS)


def refusal(initial: bytes, mask: bytes = b"") -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        decoded(initial, mask)
    assert refused.value.remedy
    return refused.value


@pytest.mark.parametrize("options", [{"image_format": "PNG"}, {"image_format": "WEBP", "lossless": True}])
def test_a_lossless_picture_of_the_right_size_arrives_as_it_is(options: dict[str, Any]) -> None:
    data = file(noise(), **options)
    got = decoded(data)
    assert np.array_equal(np.asarray(got.initial), np.asarray(noise()))
    assert (got.initial_sha256, got.mask, got.mask_sha256) == (hashlib.sha256(data).hexdigest(), None, "")


def test_pictures_are_scaled_to_the_size_that_is_generated_and_masks_stay_hard() -> None:
    mask = Image.new("L", (40, 20))
    mask.paste(255, (0, 0, 20, 20))
    got = decoded(file(noise()), file(mask), size=(16, 8))
    assert got.initial.size == (16, 8)
    assert np.array_equal(np.asarray(got.initial), np.asarray(noise().resize((16, 8), Image.Resampling.LANCZOS)))
    assert got.mask is not None
    assert set(np.unique(np.asarray(got.mask))) == {0, 255}
    assert np.asarray(got.mask)[:, :8].all()


def test_a_photo_lies_as_its_orientation_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right
    turned = Image.new("RGB", (40, 20), "black")
    turned.paste("white", (0, 0, 40, 10))
    got = decoded(file(turned, "JPEG", exif=exif, quality=95), size=(20, 40))
    pixels = np.asarray(got.initial.convert("L"))
    assert pixels[:, 12:].min() > 240
    assert pixels[:, :8].max() < 15


def test_transparency_becomes_white() -> None:
    image = Image.new("RGBA", (40, 20), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 20, 20))
    image.putpixel((30, 10), (0, 0, 0, 128))
    got = decoded(file(image)).initial
    assert (got.getpixel((5, 5)), got.getpixel((35, 5)), got.getpixel((30, 10))) == (
        (0, 0, 255),
        (255, 255, 255),
        (127, 127, 127),
    )
    palette = Image.new("P", (40, 20), 0)
    palette.putpalette([9, 9, 9, 200, 0, 0])
    palette.putpixel((3, 3), 1)
    got = decoded(file(palette, transparency=0)).initial
    assert (got.getpixel((0, 0)), got.getpixel((3, 3))) == ((255, 255, 255), (200, 0, 0))


def test_sixteen_bit_greys_are_scaled_and_not_cut_off() -> None:
    ramp = np.tile(np.linspace(0, 65535, 40).astype(np.uint16), (20, 1))
    got = np.asarray(decoded(file(Image.fromarray(ramp))).initial)[0, :, 0].astype(int)
    assert np.abs(got - np.linspace(0, 255, 40)).max() <= 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    image_format = "JPEG" if mode == "CMYK" else "PNG"
    assert decoded(file(noise(mode=mode), image_format)).initial.mode == "RGB"


def test_a_jpeg_with_further_pictures_behind_it_is_its_first() -> None:
    data = file(noise(), "MPO", save_all=True, append_images=[noise(20, 10)])
    assert decoded(data).initial.size == (40, 20)


@pytest.mark.parametrize("image_format", ["GIF", "BMP", "TIFF", "ICO", "PPM"])
def test_other_formats_are_refused(image_format: str) -> None:
    assert refusal(file(noise(), image_format)).field == "initial_image"


@pytest.mark.parametrize("data", [b"x", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"RIFF\x04\0\0\0WEBP", b"<svg/>"])
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    assert refusal(data).field == "initial_image"
    assert refusal(file(noise()), data).field == "mask_image"


@pytest.mark.parametrize("image_format", ["PNG", "WEBP"])
def test_an_animation_is_refused(image_format: str) -> None:
    others = [noise(mode="L").convert("RGB")]
    data = file(noise(), image_format, save_all=True, append_images=others, duration=50)
    assert "animation" in refusal(data).message


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_a_file_that_is_cut_off_anywhere_is_refused(image_format: str) -> None:
    data = file(noise(), image_format)
    whole = len(data) - (12 if image_format == "PNG" else 2)  # without the end mark all pixels may be there
    for length in range(1, whole, max(1, whole // 40)):
        assert refusal(data[:length]).field == "initial_image"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of damaged EXIF and does without
@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_damaged_files_are_decoded_or_refused_and_nothing_else(image_format: str) -> None:
    chance = random.Random(5)
    whole = file(noise(), image_format, **({"exif": Image.Exif()} if image_format != "PNG" else {}))
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            assert decoded(bytes(data)).initial.size == (40, 20)
        except InvalidRequest as error:
            assert error.field == "initial_image"


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims this size, with next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(101, 100), (30_000, 30_000), (2**31 - 1, 1), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_by_its_header(size: tuple[int, int]) -> None:
    assert refusal(bomb(*size)).field == "initial_image"
    assert refusal(file(noise()), bomb(*size)).field == "mask_image"


def test_a_mask_of_another_size_is_refused() -> None:
    refused = refusal(file(noise()), file(noise(20, 40, "L")))
    assert (refused.field, "20x40" in refused.message) == ("mask_image", True)


def test_a_mask_that_paints_nothing_is_refused() -> None:
    assert refusal(file(noise()), file(Image.new("L", (40, 20)))).field == "mask_image"


def test_a_mask_that_is_transparent_somewhere_is_refused() -> None:
    mask = Image.new("RGBA", (40, 20), "white")
    assert decoded(file(noise()), file(mask)).mask is not None
    mask.putpixel((3, 3), (255, 255, 255, 0))
    assert refusal(file(noise()), file(mask)).field == "mask_image"
