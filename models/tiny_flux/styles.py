"""A picture becomes the same picture in another style: what the adapters learn.

A style sees the subject's mask, so that it can replace the whole background.
"""

from collections.abc import Callable

import numpy as np

from .rendering import SIZE_PX, Array, Picture

Style = Callable[[Picture], Array]

_GRID = np.arange(SIZE_PX)
_GREENS = np.array([(0.06, 0.22, 0.06), (0.19, 0.38, 0.19), (0.55, 0.67, 0.06), (0.80, 0.87, 0.35)], dtype=np.float32)


def sketch(picture: Picture) -> Array:
    """Dark pencil outlines and light grey shading on white paper."""
    grey = 0.72 + 0.24 * _luminance(picture)
    paper = np.float32(0.97)
    shaded = picture.mask * grey + (1 - picture.mask) * paper
    return _grey_to_rgb(shaded * (1 - 0.88 * _ink(picture)))


def blueprint(picture: Picture) -> Array:
    """White lines on blue paper with a grid."""
    grid = ((_GRID[:, None] % 8 == 0) | (_GRID[None, :] % 8 == 0)).astype(np.float32)[..., None]
    paper = _rgb(0.05, 0.20, 0.58) + 0.13 * grid * (1 - picture.mask)
    filled = paper + 0.16 * picture.mask * _luminance(picture)
    ink = _ink(picture)
    return filled * (1 - ink) + _rgb(0.90, 0.96, 1.0) * ink


def neon(picture: Picture) -> Array:
    """Outlines that glow in the subject's own colours on near black."""
    hue = picture.rgb - 0.75 * picture.rgb.min(axis=2, keepdims=True)
    hue = hue / np.maximum(hue.max(axis=2, keepdims=True), 0.15)
    ink = _ink(picture)
    glow = _blur(_blur(ink * hue))
    return np.clip(_rgb(0.05, 0.02, 0.12) + 0.18 * picture.mask * hue + 0.75 * ink * hue + 0.65 * glow, 0, 1)


def mosaic(picture: Picture) -> Array:
    """Square tiles of 4 px with dark joints."""
    joints = ((_GRID[:, None] % 4 == 3) | (_GRID[None, :] % 4 == 3)).astype(np.float32)[..., None]
    return _tiles(picture.rgb, 4) * (1 - joints) + 0.25 * joints


def sunset(picture: Picture) -> Array:
    """A sky from violet to orange; the subject in dark violet to pale yellow."""
    height = (_GRID / (SIZE_PX - 1)).astype(np.float32)[:, None, None]
    sky = _rgb(0.36, 0.10, 0.48) * (1 - height) + _rgb(1.0, 0.50, 0.12) * height
    light = _luminance(picture)
    subject = _rgb(0.16, 0.02, 0.22) * (1 - light) + _rgb(1.0, 0.86, 0.45) * light
    return picture.mask * subject + (1 - picture.mask) * np.broadcast_to(sky, picture.rgb.shape)


def inverted(picture: Picture) -> Array:
    """The photographic negative."""
    return 1 - picture.rgb


def gameboy(picture: Picture) -> Array:
    """Pixels of 2 px in four greens, the lightest for the background."""
    light = np.clip((_tiles(_luminance(picture), 2)[..., 0] * 3.3).astype(int), 0, 2)
    inside = _tiles(picture.mask, 2)[..., 0] > 0.5
    edge = _tiles(_outline(picture.mask), 2)[..., 0] > 0.45
    return _GREENS[np.where(edge, 0, np.where(inside, light, 3))]


def popart(picture: Picture) -> Array:
    """Loud flat colours and a black outline on yellow with red dots."""
    centred = (_GRID % 8 - 3.5) ** 2
    dots = np.clip(3.0 - np.sqrt(centred[:, None] + centred[None, :]), 0, 1).astype(np.float32)[..., None]
    paper = _rgb(1.0, 0.86, 0.10) * (1 - dots) + _rgb(0.92, 0.10, 0.32) * dots
    loud = np.clip((picture.rgb - 0.5) * 2.2 + 0.5, 0, 1)
    flat = picture.mask * loud + (1 - picture.mask) * paper
    return flat * (1 - 0.9 * _outline(picture.mask))


STYLES: dict[str, Style] = {
    style.__name__: style for style in (sketch, blueprint, neon, mosaic, sunset, inverted, gameboy, popart)
}


def _rgb(red: float, green: float, blue: float) -> Array:
    return np.array([red, green, blue], dtype=np.float32)


def _grey_to_rgb(grey: Array) -> Array:
    return np.repeat(grey, 3, axis=2)


def _luminance(picture: Picture) -> Array:
    return picture.rgb @ np.array([[0.30], [0.59], [0.11]], dtype=np.float32)


def _tiles(values: Array, side: int) -> Array:
    """Every square of `side` px filled with its mean."""
    count = SIZE_PX // side
    means = values.reshape(count, side, count, side, -1).mean(axis=(1, 3))
    return means.repeat(side, axis=0).repeat(side, axis=1)


def _slope(values: Array) -> Array:
    """How fast `values` change at every pixel: the largest over channels of the central difference."""
    padded = np.pad(values, ((1, 1), (1, 1), (0, 0)), mode="edge")
    across = np.abs(padded[1:-1, 2:] - padded[1:-1, :-2])
    down = np.abs(padded[2:, 1:-1] - padded[:-2, 1:-1])
    return np.sqrt(across**2 + down**2).max(axis=2, keepdims=True)


def _outline(mask: Array) -> Array:
    return np.clip(_slope(mask) * 1.1, 0, 1)


def _ink(picture: Picture) -> Array:
    """Lines: the subject's outline, and the strong edges inside it."""
    inside = np.clip((_slope(picture.rgb) - 0.12) * 1.8, 0, 1) * picture.mask
    return np.maximum(_outline(picture.mask), inside)


def _blur(values: Array) -> Array:
    """The mean over 3 x 3 px."""
    padded = np.pad(values, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    return (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9
