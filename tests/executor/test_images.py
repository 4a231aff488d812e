"""From a picture to the bytes of a file, and what made it inside."""

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from executor.image_metadata import made_by
from executor.images import MAX_PREVIEW_SIDE, encode, encode_preview
from executor.jobs import AdapterChoice, AdapterReady
from loraplex.pack_options import PackOptions

from .samples import parameters

PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8))
CHOICE = AdapterChoice("sketch", 0.8, 0.25, 0.5, ("transformer",), PackOptions(waived=("bias",)))
READY = AdapterReady("sketch", 0.8, "d" * 64, "c" * 40, 4, 9, "store", 0.1, 0.2)


def read_back(data: bytes) -> dict[str, Any]:
    """What viewers find: the text chunk `parameters` of a PNG, UserComment of the others."""
    image = Image.open(io.BytesIO(data))
    if image.format == "PNG":
        written: dict[str, Any] = json.loads(image.text["parameters"])  # type: ignore[attr-defined]
        return written
    comment = image.getexif().get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment]
    assert comment.startswith(b"UNICODE\0")
    return dict(json.loads(comment[8:].decode("utf-16-be")))


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_every_format_says_what_made_the_image(image_format: str) -> None:
    asked = parameters(prompt="ein Kätzchen 猫 😺", adapters=(CHOICE,), image_format=image_format, seed=7, num_images=3)
    written = read_back(encode(PICTURE, asked, [READY], seed=9))
    assert written == {
        "prompt": "ein Kätzchen 猫 😺",
        "negative_prompt": "",
        "adapters": [
            {
                "ref": "sketch",
                "strength": 0.8,
                "commit": "c" * 40,
                "digest": "d" * 64,
                "start": 0.25,
                "end": 0.5,
                "components": ["transformer"],
                "options": {"denoiser": "", "waived": ["bias"], "max_rank": 0, "max_error": 0.0},
            }
        ],
        "seed": 9,
        "width": 64,
        "height": 64,
        "num_inference_steps": 2,
        "guidance_scale": 3.5,
        "true_cfg_scale": 1.0,
        "num_images": 1,
    }


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_without_metadata_a_file_holds_nothing_but_the_image(image_format: str) -> None:
    asked = parameters(prompt="a secret", image_format=image_format, metadata=False)
    image = Image.open(io.BytesIO(encode(PICTURE, asked, [], seed=1)))
    assert dict(image.getexif()) == {}
    assert not getattr(image, "text", {})
    assert image.size == (64, 64)


@pytest.mark.parametrize("image_format", ["PNG", "WEBP"])
def test_png_and_webp_keep_every_pixel(image_format: str) -> None:
    again = Image.open(io.BytesIO(encode(PICTURE, parameters(image_format=image_format), [], seed=1)))
    assert np.array_equal(np.asarray(again.convert("RGB")), np.asarray(PICTURE))


def test_of_an_initial_image_its_digest_is_written_and_not_its_bytes() -> None:
    asked = parameters(
        initial_image=PICTURE,
        mask_image=PICTURE.convert("L"),
        initial_image_sha256="a" * 64,
        mask_image_sha256="b" * 64,
        image_strength=0.5,
    )
    written = made_by(asked, [], 1, 0)
    given = {name: value for name, value in written.items() if "image" in name and name != "num_images"}
    assert given == {"initial_image_sha256": "a" * 64, "mask_image_sha256": "b" * 64, "image_strength": 0.5}
    assert "mask_image_sha256" not in made_by(parameters(initial_image=PICTURE), [], 1, 0)


def test_a_frame_says_which_one_it_is() -> None:
    written = made_by(parameters(num_frames=5), [], 1, 3)
    assert (written["num_frames"], written["frame"]) == (5, 3)


@pytest.mark.parametrize("image_format", ["JPEG", "WEBP"])
def test_texts_that_are_too_long_for_exif_are_left_out_and_the_image_is_written(image_format: str) -> None:
    fixed = len(json.dumps(made_by(parameters(prompt=""), [], 5, 0))) + len("UNICODE")
    for length, fits in ((32_400 - fixed, True), (32_600 - fixed, False)):
        asked = parameters(prompt="猫" * length, image_format=image_format)
        written = read_back(encode(PICTURE, asked, [], seed=5))
        assert (written["seed"], "prompt" in written) == (5, fits)


def test_a_preview_is_a_small_jpeg_whatever_the_image_is() -> None:
    for size in ((8, 8), (64, 64), (4096, 2048)):
        data = encode_preview(Image.effect_noise(size, 80))
        preview = Image.open(io.BytesIO(data))
        assert preview.format == "JPEG"
        assert max(preview.size) <= MAX_PREVIEW_SIDE
        assert len(data) < 60_000
