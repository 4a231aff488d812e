"""A cheap look at an image that is being made: a linear map from each cell of the latents to the colours it becomes.

The map is fitted when the model is loaded, to the last latents of some images and those images. That asks nothing of
the family: packed or not, scaled or not, the latents are whatever the pipeline shows after a step. A preview then costs
one small matrix product, and never the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

_PIXELS_PER_PREVIEW_PIXEL = 8
_RIDGE = 1e-4


@dataclass(frozen=True)
class LatentToRgb:
    """A fitted map."""

    weights: torch.Tensor  # [features + 1, side * side * 3], fp32
    multiple: int  # of the resolution; packed latents have a token for a square of this many pixels

    @property
    def side(self) -> int:
        """Preview pixels along one cell of the latents."""
        return round((self.weights.shape[1] / 3) ** 0.5)

    @classmethod
    def fit(cls, latents: torch.Tensor, images: Sequence[Image.Image], multiple: int) -> "LatentToRgb":
        """By least squares. Raises ValueError when latents of this shape do not lie on a grid over the images."""
        width, height = images[0].size
        cells = _cells(latents, width, height, multiple)  # [images, rows, columns, features]
        rows, columns = cells.shape[1:3]
        side = max(1, width // columns // _PIXELS_PER_PREVIEW_PIXEL)
        small = [one.convert("RGB").resize((columns * side, rows * side), Image.Resampling.BOX) for one in images]
        colours = torch.from_numpy(np.stack([np.asarray(one) for one in small])).double() / 255
        colours = colours.reshape(len(images), rows, side, columns, side, 3).permute(0, 1, 3, 2, 4, 5)
        x = cells.double().flatten(0, 2)
        y = colours.reshape(len(x), -1)
        centred = x - x.mean(0)
        gram = centred.T @ centred
        gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        slopes = torch.linalg.solve(gram, centred.T @ (y - y.mean(0)))
        weights = torch.cat([slopes, (y.mean(0) - x.mean(0) @ slopes)[None]])
        return cls(weights.float(), multiple)

    def images(self, latents: torch.Tensor, width: int, height: int) -> list[Image.Image]:
        """One small image per sample; of a video its first frame."""
        cells = _cells(latents, width, height, self.multiple)
        number, rows, columns = cells.shape[:3]
        colours = (_with_one(cells) @ self.weights).reshape(number, rows, columns, self.side, self.side, 3)
        pixels = colours.permute(0, 1, 3, 2, 4, 5).reshape(number, rows * self.side, columns * self.side, 3)
        levels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
        return [Image.fromarray(one) for one in levels]


def _cells(latents: torch.Tensor, width: int, height: int, multiple: int) -> torch.Tensor:
    """[images, rows, columns, features] on the CPU in fp32; of a video the first frame."""
    latents = latents.detach().float().cpu()
    if latents.ndim == 5:  # [images, features, frames, rows, columns]
        latents = latents[:, :, 0]
    if latents.ndim == 4:  # [images, features, rows, columns]
        return latents.permute(0, 2, 3, 1)
    rows, columns = height // multiple, width // multiple
    if latents.ndim != 3 or latents.shape[1] % (rows * columns):  # [images, frames * rows * columns, features]
        raise ValueError(f"latents of shape {tuple(latents.shape)} have no known grid over {width} x {height} pixels")
    return latents[:, : rows * columns].unflatten(1, (rows, columns))


def _with_one(cells: torch.Tensor) -> torch.Tensor:
    return torch.cat([cells, torch.ones_like(cells[..., :1])], dim=-1)
