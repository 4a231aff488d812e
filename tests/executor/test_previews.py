"""Latents as colours: the map is fitted to images and their latents, whatever the latents look like."""

import numpy as np
import pytest
import torch
from PIL import Image

from executor.jobs import PreviewDone
from executor.previews import LatentToRgb
from executor.service import LoadedModel

from .samples import Watched
from .test_engine import pixels

SIZE = 64


def images(number: int) -> tuple[torch.Tensor, list[Image.Image]]:
    """Colours [number, 8, 8, 3], and images with a square of 8 pixels of each."""
    colours = torch.rand(number, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    levels = (colours * 255).round().to(torch.uint8)
    big = levels.repeat_interleave(8, 1).repeat_interleave(8, 2).numpy()
    return levels / 255, [Image.fromarray(one) for one in big]


@pytest.mark.parametrize("form", ["four", "packed", "video"])
def test_a_linear_autoencoder_is_recovered(form: str) -> None:
    colours, pictures = images(6)
    mixed = colours @ torch.randn(3, 5, generator=torch.Generator().manual_seed(1)) + 1.0  # [6, 8, 8, 5]
    latents = {
        "four": mixed.permute(0, 3, 1, 2),
        "packed": mixed.flatten(1, 2),
        "video": torch.stack([mixed, mixed * 0], dim=1).permute(0, 4, 1, 2, 3),
    }[form]
    fitted = LatentToRgb.fit(latents[:4], pictures[:4], multiple=8)
    for made, expected in zip(fitted.images(latents[4:], SIZE, SIZE), colours[4:], strict=True):
        assert made.size == (8, 8)
        assert np.abs(np.asarray(made) / 255 - expected.numpy()).max() < 0.05


def test_latents_without_a_grid_over_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match="no known grid"):
        LatentToRgb.fit(torch.zeros(1, 63, 5), images(1)[1], multiple=8)


def test_the_last_preview_of_a_job_resembles_its_image(model: LoadedModel) -> None:
    watched = Watched(num_inference_steps=6, preview_every_steps=3, num_images=2)
    model.engine.submit(watched.job, ())
    watched.end()
    previews = [event for event in watched.seen if isinstance(event, PreviewDone)]
    assert [(event.step, event.index) for event in previews] == [(3, 0), (3, 1), (6, 0), (6, 1)]
    base = model.base
    assert base.latent_to_rgb is not None
    for preview, image in zip(previews[2:], watched.images, strict=True):
        small = pixels(preview)
        picture = Image.fromarray(pixels(image).astype(np.uint8)).resize(small.shape[1::-1], Image.Resampling.BOX)
        assert np.corrcoef(small.ravel(), np.asarray(picture).ravel())[0, 1] > 0.8
