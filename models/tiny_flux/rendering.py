"""A prompt's subject becomes a picture of 64 x 64 px."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from .vocabulary import BACKGROUNDS, COLOURS, OBJECTS, Subject

SIZE_PX = 64
EMOJI_FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")  # Debian: fonts-noto-color-emoji
EMOJI_FONT_SIZE = 109  # the only size in the font
OVERSAMPLE = 4
CANVAS = SIZE_PX * OVERSAMPLE

Array = NDArray[np.float32]
Point = tuple[float, float]


@dataclass(frozen=True)
class Picture:
    """A rendered subject: `rgb` [64, 64, 3] and the subject's coverage `mask` [64, 64, 1], both from 0 to 1."""

    rgb: Array
    mask: Array


def render(subject: Subject, rng: random.Random) -> Picture:
    """Draw `subject` near the middle; place and size vary by a few pixels with `rng`."""
    side = rng.choice(range(196, 213, 4)) if subject.thing in OBJECTS else rng.choice(range(164, 185, 4))
    layer = _object_layer(subject.thing, side) if subject.thing in OBJECTS else _shape_layer(subject, side)
    left, top = ((CANVAS - length) // 2 + rng.randint(-6, 6) for length in layer.size)
    canvas = Image.new("RGBA", (CANVAS, CANVAS), (0, 0, 0, 0))
    canvas.paste(layer, (left, top))
    small = np.asarray(
        canvas.convert("RGBa").resize((SIZE_PX, SIZE_PX), Image.Resampling.BOX), dtype=np.float32
    ) / np.float32(255)
    mask = small[..., 3:]
    background = np.asarray(BACKGROUNDS[subject.background], dtype=np.float32) / np.float32(255)
    return Picture(small[..., :3] + (1 - mask) * background, mask)


@lru_cache(maxsize=1024)
def _object_layer(thing: str, side: int) -> Image.Image:
    """The emoji, cut to its outline and as large as fits into `side`."""
    font = ImageFont.truetype(str(EMOJI_FONT), EMOJI_FONT_SIZE)
    sheet = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(sheet).text((10, 10), OBJECTS[thing], font=font, embedded_color=True)
    glyph = sheet.crop(sheet.getbbox())
    factor = side / max(glyph.size)
    width, height = (round(length * factor) for length in glyph.size)
    return glyph.resize((width, height), Image.Resampling.BICUBIC)


@lru_cache(maxsize=1024)
def _shape_layer(subject: Subject, side: int) -> Image.Image:
    layer = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    _SHAPES[subject.thing](ImageDraw.Draw(layer), side, COLOURS[subject.colour])
    return layer


def _circle(draw: ImageDraw.ImageDraw, side: int, fill: tuple[int, int, int]) -> None:
    draw.ellipse((0, 0, side - 1, side - 1), fill=fill)


def _ring(draw: ImageDraw.ImageDraw, side: int, fill: tuple[int, int, int]) -> None:
    draw.ellipse((0, 0, side - 1, side - 1), outline=fill, width=side // 5)


def _square(draw: ImageDraw.ImageDraw, side: int, fill: tuple[int, int, int]) -> None:
    margin = side // 14
    draw.rectangle((margin, margin, side - margin, side - margin), fill=fill)


def _cross(draw: ImageDraw.ImageDraw, side: int, fill: tuple[int, int, int]) -> None:
    arm = side // 3
    draw.rectangle((arm, 0, side - arm, side), fill=fill)
    draw.rectangle((0, arm, side, side - arm), fill=fill)


def _polygon(corners: list[Point]) -> Callable[[ImageDraw.ImageDraw, int, tuple[int, int, int]], None]:
    """Draws `corners`, given as parts of the side."""

    def draw_polygon(draw: ImageDraw.ImageDraw, side: int, fill: tuple[int, int, int]) -> None:
        draw.polygon([(x * side, y * side) for x, y in corners], fill=fill)

    return draw_polygon


def _star_corners() -> list[Point]:
    radii = [0.54, 0.23] * 5
    angles = [math.pi * (i / 5 - 0.5) for i in range(10)]
    return [(0.5 + r * math.cos(a), 0.54 + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _heart_corners() -> list[Point]:
    """The usual curve 16 sin^3 t; 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t, scaled into the unit square."""
    corners = []
    for i in range(80):
        t = 2 * math.pi * i / 80
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        corners.append((0.5 + x / 33, 0.46 - y / 33))
    return corners


_SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, int, tuple[int, int, int]], None]] = {
    "circle": _circle,
    "ring": _ring,
    "square": _square,
    "cross": _cross,
    "triangle": _polygon([(0.5, 0.03), (1.0, 0.95), (0.0, 0.95)]),
    "diamond": _polygon([(0.5, 0.0), (0.92, 0.5), (0.5, 1.0), (0.08, 0.5)]),
    "star": _polygon(_star_corners()),
    "heart": _polygon(_heart_corners()),
}
