"""A contact sheet: images in rows and columns, with a caption for every row and every column."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

ZOOM = 3
GAP = 6
MARGIN = 16
ROW_CAPTION_WIDTH = 190
BACKGROUND, INK, FAINT, RULE = "#ffffff", "#161616", "#6a6a6a", "#d5d5d5"


@dataclass(frozen=True)
class Row:
    """One row of images; `title` and `detail` stand at its left, `section` above it when it starts one."""

    title: str
    detail: str
    images: Sequence[Image.Image]
    section: str = ""


def contact_sheet(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Image.Image:
    """Lay the images out, each enlarged ZOOM times; all must have the size of the first."""
    width, height = (side * ZOOM for side in rows[0].images[0].size)
    left = MARGIN + ROW_CAPTION_WIDTH
    captions = [_wrapped(column, width) for column in columns]
    header = 34 + 20 * max(caption.count("\n") + 1 for caption in captions)
    sections = sum(bool(row.section) for row in rows)
    sheet_size = (
        left + len(columns) * (width + GAP) + MARGIN - GAP,
        MARGIN + header + len(rows) * (height + GAP) + sections * 34 + MARGIN,
    )
    sheet = Image.new("RGB", sheet_size, BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, INK, _font(20))
    y = MARGIN + header
    for number, caption in enumerate(captions):
        middle = left + number * (width + GAP) + width // 2
        draw.multiline_text((middle, y - 8), caption, INK, _font(15), anchor="md", align="center")
    for row in rows:
        if row.section:
            draw.line((MARGIN, y + 6, sheet.width - MARGIN, y + 6), RULE)
            draw.text((MARGIN, y + 11), row.section, FAINT, _font(14))
            y += 34
        _draw_row(sheet, draw, row, (left, y), (width, height))
        y += height + GAP
    return sheet


def _draw_row(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, row: Row, at: tuple[int, int], size: tuple[int, int]
) -> None:
    (left, top), (width, height) = at, size
    caption = textwrap.fill(row.title, 20)
    draw.multiline_text((MARGIN, top + height // 2), caption, INK, _font(18), anchor="ld")
    draw.multiline_text((MARGIN, top + height // 2 + 6), row.detail, FAINT, _font(14))
    for number, image in enumerate(row.images):
        enlarged = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        sheet.paste(enlarged, (left + number * (width + GAP), top))


def _wrapped(caption: str, width: int) -> str:
    return textwrap.fill(caption, max(10, width // 8))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
