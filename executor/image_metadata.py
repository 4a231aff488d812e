"""What made an image, written into its file where viewers look for it: PNG text chunks, EXIF UserComment in the others.

The UserComment is where A1111 and its kin put and find theirs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from PIL import ExifTags, Image, PngImagePlugin

from executor.jobs import AdapterChoice, AdapterReady, Parameters
from loraplex.pack_options import EXACTLY

_MAX_EXIF_BYTES = 65_000  # a segment of a JPEG holds 65,533, the rest of its EXIF included


def made_by(parameters: Parameters, adapters: Sequence[AdapterReady], seed: int, frame: int) -> dict[str, Any]:
    """All that makes this one image again, for JSON; of the images that it started from the sha256 of their files."""
    return {
        "prompt": parameters.prompt,
        "negative_prompt": parameters.negative_prompt,
        "adapters": [_adapter(*pair) for pair in zip(parameters.adapters, adapters, strict=True)],
        "seed": seed,
        "width": parameters.width,
        "height": parameters.height,
        "num_inference_steps": parameters.num_inference_steps,
        "guidance_scale": parameters.guidance_scale,
        "true_cfg_scale": parameters.true_cfg_scale,
        "num_images": 1,
        **_of_video(parameters, frame),
        **_of_initial_image(parameters),
    }


def text_chunks(described: Mapping[str, Any]) -> PngImagePlugin.PngInfo:
    """The text chunks `prompt`, and `parameters` with all of it as JSON."""
    chunks = PngImagePlugin.PngInfo()
    chunks.add_itxt("prompt", described["prompt"])
    chunks.add_itxt("parameters", json.dumps(described, ensure_ascii=False))
    return chunks


def exif(described: Mapping[str, Any]) -> Image.Exif:
    """The JSON as UserComment; without its texts where they are too long for EXIF."""
    comment = _user_comment(described)
    if len(comment) > _MAX_EXIF_BYTES:
        texts = ("prompt", "negative_prompt", "adapters")
        comment = _user_comment({name: value for name, value in described.items() if name not in texts})
    tags = Image.Exif()
    tags.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    return tags


def _user_comment(described: Mapping[str, Any]) -> bytes:
    return b"UNICODE\0" + json.dumps(described, ensure_ascii=False).encode("utf-16-be", errors="replace")


def _adapter(choice: AdapterChoice, ready: AdapterReady) -> dict[str, Any]:
    return {
        "ref": choice.ref,
        "strength": choice.strength,
        "commit": ready.commit,
        "digest": ready.digest,
        "start": choice.start,
        "end": choice.end,
        "components": list(choice.components),
        **({} if choice.options == EXACTLY else {"options": asdict(choice.options)}),
    }


def _of_video(parameters: Parameters, frame: int) -> dict[str, Any]:
    return {"num_frames": parameters.num_frames, "frame": frame} if parameters.num_frames > 1 else {}


def _of_initial_image(parameters: Parameters) -> dict[str, Any]:
    if parameters.initial_image is None:
        return {}
    mask = {"mask_image_sha256": parameters.mask_image_sha256} if parameters.mask_image else {}
    return {
        "initial_image_sha256": parameters.initial_image_sha256,
        "image_strength": parameters.image_strength,
        **mask,
    }
