"""Contact sheets of the base model and its adapters, for looking at.

python -m models.tiny_flux.sheet /tmp/sheet.png                      # prompts down, adapters across
python -m models.tiny_flux.sheet /tmp/sheet.png --base-only          # many prompts, no adapter
python -m models.tiny_flux.sheet /tmp/sheet.png --mix sketch sunset  # one, the other, and both
"""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, FluxPipeline
from PIL import Image

from .adapter_files import is_kohya, merge_kohya
from .architecture import ADAPTERS, BASE, SIZE_PX, TOKENS
from .vocabulary import BACKGROUNDS, OBJECTS, Subject

STEPS = 16
ZOOM = 2
MIX_STRENGTH = 0.8
PROMPTS = [
    Subject("cat", "blue"),
    Subject("rocket", "white"),
    Subject("house", "green"),
    Subject("circle", "white", "red"),
    Subject("star", "blue", "yellow"),
    Subject("panda", "red"),
    Subject("car", "yellow"),
    Subject("heart", "black", "white"),
]


def load_base(folder: Path = BASE) -> FluxPipeline:
    """The base model in float32, without a progress bar."""
    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: FluxPipeline, prompts: list[str], seed: int = 0) -> list[Image.Image]:
    """One picture per prompt, all from the same noise."""
    return pipeline(
        prompts,
        height=SIZE_PX,
        width=SIZE_PX,
        num_inference_steps=STEPS,
        max_sequence_length=TOKENS,
        generator=[torch.Generator().manual_seed(seed) for _ in prompts],
    ).images


def paste(rows: Iterable[list[Image.Image]]) -> Image.Image:
    """The pictures as one image, enlarged."""
    grid = list(rows)
    side = SIZE_PX * ZOOM
    sheet = Image.new("RGB", (side * max(map(len, grid)), side * len(grid)), "white")
    for y, row in enumerate(grid):
        for x, picture in enumerate(row):
            sheet.paste(picture.resize((side, side), Image.Resampling.BICUBIC), (x * side, y * side))
    return sheet


def base_sheet(pipeline: FluxPipeline) -> Image.Image:
    """Every object once and the prompts of the adapter sheet, twelve in a row."""
    backgrounds = list(BACKGROUNDS)
    subjects = [Subject(thing, backgrounds[i % len(backgrounds)]) for i, thing in enumerate(OBJECTS)]
    pictures = draw(pipeline, [subject.prompt() for subject in [*subjects, *PROMPTS]])
    return paste(pictures[i : i + 12] for i in range(0, len(pictures), 12))


def adapter_sheet(pipeline: FluxPipeline, names: list[str]) -> Image.Image:
    """A row without adapter, then a row for each."""
    return _rows(pipeline, [{}, *({name: 1.0} for name in names)])


def mix_sheet(pipeline: FluxPipeline, names: list[str], strength: float = MIX_STRENGTH) -> Image.Image:
    """A row for each adapter and a last row with all of them at `strength`."""
    return _rows(pipeline, [*({name: 1.0} for name in names), dict.fromkeys(names, strength)])


def _rows(pipeline: FluxPipeline, mixtures: list[dict[str, float]]) -> Image.Image:
    prompts = [subject.prompt() for subject in PROMPTS]
    rows = []
    for strengths in mixtures:
        with applied(pipeline, strengths):
            rows.append(draw(pipeline, prompts))
    return paste(rows)


@contextmanager
def applied(pipeline: FluxPipeline, strengths: dict[str, float]) -> Iterator[None]:
    """Within the block `pipeline` has these adapters: diffusers' naming through diffusers, kohya's merged by us."""
    files = {name: ADAPTERS / f"{name}.safetensors" for name in strengths}
    merged = [name for name, file in files.items() if is_kohya(file)]
    loaded = [name for name in files if name not in merged]
    for name in merged:
        merge_kohya(pipeline.transformer, files[name], strengths[name])
    for name in loaded:
        pipeline.load_lora_weights(files[name], adapter_name=name)
    if loaded:
        pipeline.set_adapters(loaded, [strengths[name] for name in loaded])
    yield
    pipeline.unload_lora_weights()
    for name in merged:
        merge_kohya(pipeline.transformer, files[name], -strengths[name])


def main() -> None:
    """Draw the sheet that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--base", type=Path, default=BASE)
    parser.add_argument("--base-only", action="store_true")
    parser.add_argument("--mix", nargs="+", metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pipeline = load_base(arguments.base)
    if arguments.base_only:
        sheet = base_sheet(pipeline)
    elif arguments.mix:
        sheet = mix_sheet(pipeline, arguments.mix)
    else:
        sheet = adapter_sheet(pipeline, sorted(file.stem for file in ADAPTERS.glob("*.safetensors")))
    sheet.save(arguments.output)


if __name__ == "__main__":
    main()
