"""Step ranges, components and initial images through both services are those of diffusers + PEFT.

The reference changes its adapters by callback between the steps.
"""

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxInpaintPipeline
from PIL import Image

from loraplex import AdapterSelection, Preview, StepDone
from loraplex.client import Result
from loraplex.errors import InvalidRequest
from tests.e2e.oracle import Reference, largest_pixel_difference, largest_relative_error
from tests.e2e.pair import ADAPTERS, MAX_SEQUENCE_LENGTH, DenoiserRecord, Pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "a red circle on a white background"
SEED, STEPS = 7, 6
TOLERANCE = 1e-4


def initial_image() -> Image.Image:
    """A smooth picture of another size than what is generated."""
    across, down = np.meshgrid(np.linspace(0, 1, 96), np.linspace(0, 1, 80))
    return Image.fromarray((np.stack([across, down, 1 - across], axis=-1) * 255).astype(np.uint8))


def mask_image() -> Image.Image:
    """The right half is painted anew."""
    mask = Image.new("L", (96, 80))
    mask.paste(255, (48, 0, 96, 80))
    return mask


class Changing(Reference):
    """A reference whose adapters apply to ranges of steps and to some components."""

    def __init__(self, selections: Sequence[AdapterSelection]) -> None:
        super().__init__({ADAPTERS / f"{selection.ref}.safetensors": 1.0 for selection in selections})
        self._selections = selections

    def draw(self, steps: int, pipeline: Any = None, **more: Any) -> Image.Image:
        """One image of `steps` steps; `pipeline` is of another class with the same components."""

        def next_step(_pipeline: Any, step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            self._select((step + 1) / steps)
            return kwargs

        self._select(0.0)
        self.outputs.clear()
        return (pipeline or self.pipeline)(
            PROMPT,
            width=64,
            height=64,
            guidance_scale=3.5,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            generator=torch.Generator().manual_seed(SEED),
            callback_on_step_end=next_step,
            **more,
        ).images[0]

    def _select(self, progress: float) -> None:
        weights = []
        for one in self._selections:
            strength = one.strength if one.start <= progress < one.end else 0.0
            names = one.components or ("transformer", "text_encoder")
            weights.append({name: strength * (name in names) for name in ("transformer", "text_encoder")})
        self.pipeline.set_adapters([f"a{position}" for position in range(len(weights))], weights)


def drawn(pair: Pair, selections: Sequence[AdapterSelection], **more: Any) -> Result:
    with pair.client() as client:
        return client.generate_image(PROMPT, adapters=selections, seed=SEED, num_inference_steps=STEPS, **more)


@pytest.mark.parametrize(
    "selections",
    [
        [AdapterSelection("sketch", 0.9, end=0.5)],
        [AdapterSelection("sketch", 0.9, start=0.5)],
        [AdapterSelection("sketch", end=0.3), AdapterSelection("neon", 0.8, start=0.3)],
        [AdapterSelection("sketch", 0.7, start=0.1, end=0.9), AdapterSelection("mosaic", 0.6, end=0.4)],
        [AdapterSelection("gameboy", components=("text_encoder",))],
        [AdapterSelection("gameboy", components=("transformer",), start=0.34)],
        [AdapterSelection("gameboy", end=0.5)],
    ],
    ids=str,
)
def test_an_adapter_applies_to_its_steps_and_components_alone(
    pair: Pair, denoiser_record: DenoiserRecord, selections: list[AdapterSelection]
) -> None:
    result = drawn(pair, selections)
    reference = Changing(selections)
    expected = reference.draw(STEPS, num_inference_steps=STEPS)
    assert largest_relative_error(denoiser_record.outputs, reference.outputs) < TOLERANCE
    assert largest_pixel_difference(result.image, expected) <= 1
    assert result.summary.recompilations == 0


def test_with_true_guidance_a_step_is_two_calls(pair: Pair, denoiser_record: DenoiserRecord) -> None:
    selections = [AdapterSelection("sketch", 0.9, end=0.5), AdapterSelection("sunset", 0.5, start=0.5)]
    guidance: dict[str, Any] = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    result = drawn(pair, selections, **guidance)
    reference = Changing(selections)
    expected = reference.draw(STEPS, num_inference_steps=STEPS, **guidance)
    assert len(denoiser_record.outputs) == 2 * STEPS
    assert largest_relative_error(denoiser_record.outputs, reference.outputs) < TOLERANCE
    assert largest_pixel_difference(result.image, expected) <= 1


def test_one_adapter_may_change_its_strength_on_the_way(pair: Pair, denoiser_record: DenoiserRecord) -> None:
    result = drawn(pair, [AdapterSelection("sketch", 1.0, end=0.5), AdapterSelection("sketch", 0.25, start=0.5)])
    halves = [Changing([AdapterSelection("sketch", 1.0, end=0.5)]), Changing([AdapterSelection("sketch", 0.25)])]
    halves[0].draw(STEPS, num_inference_steps=STEPS)
    first_half = STEPS // 2
    first = largest_relative_error(denoiser_record.outputs[:first_half], halves[0].outputs[:first_half])
    assert first < TOLERANCE
    assert [one.strength for one in result.summary.adapters] == [1.0, 0.25]
    arguments, output = denoiser_record.calls[-1]
    halves[1]._select(0.0)
    with torch.no_grad():
        expected = halves[1].pipeline.transformer(**arguments)[0]
    assert largest_relative_error([output], [expected]) < TOLERANCE


@pytest.mark.parametrize(("strength", "steps"), [(None, 4), (0.5, 3), (1.0, 6), (0.2, 2)])
def test_image_to_image_is_that_of_diffusers(
    pair: Pair, denoiser_record: DenoiserRecord, strength: float | None, steps: int
) -> None:
    selections = [AdapterSelection("sketch", 0.9, start=0.5)]
    result = drawn(pair, selections, initial_image=initial_image(), image_strength=strength)
    reference = Changing(selections)
    pipeline = FluxImg2ImgPipeline(**reference.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    scaled = initial_image().resize((64, 64), Image.Resampling.LANCZOS)
    given = {} if strength is None else {"strength": strength}
    expected = reference.draw(steps, pipeline, num_inference_steps=STEPS, image=scaled, **given)
    assert largest_relative_error(denoiser_record.outputs, reference.outputs) < TOLERANCE
    assert largest_pixel_difference(result.image, expected) <= 1
    assert (result.summary.steps, result.summary.recompilations) == (steps, 0)


def test_inpainting_is_that_of_diffusers_and_keeps_what_is_black(pair: Pair) -> None:
    result = drawn(pair, [], initial_image=initial_image(), mask_image=mask_image(), image_strength=0.9)
    reference = Changing([])
    reference._select = lambda progress: None  # type: ignore[method-assign]  # there is no adapter to select
    pipeline = FluxInpaintPipeline(**reference.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    scaled = initial_image().resize((64, 64), Image.Resampling.LANCZOS)
    mask = mask_image().resize((64, 64), Image.Resampling.NEAREST)
    expected = reference.draw(STEPS, pipeline, num_inference_steps=STEPS, image=scaled, mask_image=mask, strength=0.9)
    assert largest_pixel_difference(result.image, expected) <= 1
    kept, painted = np.asarray(result.image, dtype=int)[:, :24], np.asarray(result.image, dtype=int)[:, 40:]
    original = np.asarray(scaled, dtype=int)
    assert np.abs(kept - original[:, :24]).mean() < np.abs(painted - original[:, 40:]).mean() / 2


def test_image_i_of_an_image_to_image_request_is_the_image_of_seed_plus_i(pair: Pair) -> None:
    more: dict[str, Any] = {"initial_image": initial_image(), "num_inference_steps": STEPS}
    with pair.client() as client:
        many = client.generate_image(PROMPT, seed=SEED, num_images=2, **more)
        single = client.generate_image(PROMPT, seed=SEED + 1, **more)
    assert largest_pixel_difference(many.images[1], single.image) <= 1


def test_previews_come_after_every_so_many_steps_and_look_more_and_more_like_the_image(pair: Pair) -> None:
    with pair.client() as client:
        events = list(client.generate(PROMPT, seed=SEED, num_inference_steps=8, preview_every_steps=3))
    kinds = [event for event in events if isinstance(event, Preview | StepDone)]
    previews = [event for event in events if isinstance(event, Preview)]
    assert [(preview.step, preview.index) for preview in previews] == [(3, 0), (6, 0)]
    assert kinds.index(previews[0]) == kinds.index(StepDone(3, 8)) + 1
    image = Result.of(events).image
    distances = [
        np.abs(np.asarray(preview.to_pil().resize((64, 64)), dtype=int) - np.asarray(image, dtype=int)).mean()
        for preview in previews
    ]
    assert distances[1] < distances[0]


def test_metadata_tell_what_made_the_image(pair: Pair) -> None:
    result = drawn(pair, [AdapterSelection("sketch", 0.9, end=0.5)], initial_image=initial_image())
    written = json.loads(result.image.text["parameters"])  # type: ignore[attr-defined]
    assert (written["adapters"][0]["end"], written["image_strength"]) == (0.5, 0.6)
    assert len(written["initial_image_sha256"]) == 64
    assert len(io.BytesIO(result.encoded[0].data).getvalue()) < 64 * 64 * 3 + 4000


def test_what_an_adapter_cannot_do_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="does not adapt text_encoder") as refused:
        drawn(pair, [AdapterSelection("sketch", components=("text_encoder",))])
    assert refused.value.field == "adapters[0].components"
    with pytest.raises(InvalidRequest, match="do not modify 'vae'"):
        drawn(pair, [AdapterSelection("sketch", components=("vae",))])
