"""From a picture to the bytes of a file, with the parameters that made it in PNG text chunks."""

import io
import json
from dataclasses import asdict

from PIL import Image, PngImagePlugin

from executor.jobs import AdapterReady, Parameters


def encode(image: Image.Image, parameters: Parameters, adapters: tuple[AdapterReady, ...], seed: int) -> bytes:
    """The image in the job's format. A PNG says in its text chunks what made it: `prompt`, and JSON `parameters`."""
    target = io.BytesIO()
    if parameters.image_format == "PNG":
        image.save(target, "PNG", pnginfo=_text_chunks(parameters, adapters, seed))
    elif parameters.image_format == "JPEG":
        image.save(target, "JPEG", quality=95)
    else:
        image.save(target, "WEBP", lossless=True)
    return target.getvalue()


def _text_chunks(parameters: Parameters, adapters: tuple[AdapterReady, ...], seed: int) -> PngImagePlugin.PngInfo:
    made_by = asdict(parameters) | {
        "seed": seed,
        "num_images": 1,
        "adapters": [{"ref": a.ref, "strength": a.strength, "commit": a.commit, "digest": a.digest} for a in adapters],
    }
    del made_by["image_format"]
    chunks = PngImagePlugin.PngInfo()
    chunks.add_itxt("prompt", parameters.prompt)
    chunks.add_itxt("parameters", json.dumps(made_by, ensure_ascii=False))
    return chunks
