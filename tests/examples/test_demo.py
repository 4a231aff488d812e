"""The contact sheet of the demo, with made-up images."""

from PIL import Image

from examples.contact_sheet import ZOOM, Row, contact_sheet
from examples.demo import PROMPTS, recipes


def test_the_sheet_shows_every_adapter_a_mix_and_three_strengths():
    assert [dict(recipe.adapters) for recipe in recipes(["neon", "sketch"])] == [
        {},
        {"neon": 1.0},
        {"sketch": 1.0},
        {"sketch": 0.6, "neon": 0.6},
        {"sketch": 0.0},
        {"sketch": 0.5},
        {"sketch": 1.0},
    ]


def test_a_store_without_adapters_still_shows_the_base_model():
    assert [recipe.title for recipe in recipes([])] == ["no adapter"]


def test_every_image_stands_on_the_sheet_enlarged():
    colours = ["#ff0000", "#00ff00", "#0000ff"]
    rows = [Row("a row", "rank 4", [Image.new("RGB", (64, 64), colour) for colour in colours], section="a section")]
    sheet = contact_sheet("title", PROMPTS, rows)
    counts = {colour: number for number, colour in sheet.getcolors(sheet.width * sheet.height) or []}
    for colour in colours:
        rgb = tuple(bytes.fromhex(colour[1:]))
        assert counts[rgb] == (64 * ZOOM) ** 2
