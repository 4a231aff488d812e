"""Images and denoiser outputs through both services are those of diffusers + PEFT and of densely merged weights."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from prometheus_client import REGISTRY

from tests.e2e.oracle import (
    Reference,
    Strengths,
    largest_pixel_difference,
    largest_relative_error,
    merged_denoiser,
    relative_error,
    run_double,
)
from tests.e2e.pair import ADAPTERS, BASE, DenoiserRecord, Pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "a red circle on a white background"
SEED, STEPS = 7, 6
TOLERANCE = 1e-4  # fp32 rounding over a whole generation

FILES = sorted(ADAPTERS.glob("*.safetensors"))
NAMES = [file.stem for file in FILES]


def _file(name: str) -> Path:
    return ADAPTERS / f"{name}.safetensors"


def _check_against_oracles(pair: Pair, record: DenoiserRecord, strengths: Strengths) -> None:
    with pair.client() as client:
        result = client.generate_image(
            PROMPT,
            adapters={file.stem: strength for file, strength in strengths.items()},
            seed=SEED,
            num_inference_steps=STEPS,
        )
    reference = Reference(strengths)
    expected = reference.generate(PROMPT, SEED, STEPS)
    assert largest_relative_error(record.outputs, reference.outputs) < TOLERANCE
    assert largest_pixel_difference(result.image, expected) <= 1
    merged = merged_denoiser(strengths)
    for arguments, output in record.calls:
        assert relative_error(output, run_double(merged, arguments)) < TOLERANCE
    assert [adapter.strength for adapter in result.summary.adapters] == list(strengths.values())
    assert result.summary.recompilations == 0


def test_there_are_at_least_six_adapters() -> None:
    assert len(FILES) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_every_adapter_is_applied_as_trained(pair: Pair, denoiser_record: DenoiserRecord, name: str) -> None:
    _check_against_oracles(pair, denoiser_record, {_file(name): 1.0})


@pytest.mark.parametrize("strength", [0.5, -0.75, 1.6])
def test_strength_scales_the_whole_adapter(pair: Pair, denoiser_record: DenoiserRecord, strength: float) -> None:
    _check_against_oracles(pair, denoiser_record, {FILES[0]: strength})


@pytest.mark.parametrize("first", range(len(FILES) - 1))
def test_two_adapters_mix(pair: Pair, denoiser_record: DenoiserRecord, first: int) -> None:
    _check_against_oracles(pair, denoiser_record, {FILES[first]: 0.7, FILES[first + 1]: 0.4})


def test_the_base_is_within_rounding_of_the_untouched_base(pair: Pair, denoiser_record: DenoiserRecord) -> None:
    _check_against_oracles(pair, denoiser_record, {})


def test_strength_zero_and_no_adapter_are_bit_identical(pair: Pair, denoiser_record: DenoiserRecord) -> None:
    with pair.client() as client:
        plain = client.generate_image(PROMPT, seed=SEED, num_inference_steps=STEPS)
        base_outputs = list(denoiser_record.outputs)
        for name in NAMES:
            denoiser_record.calls.clear()
            zero = client.generate_image(PROMPT, adapters={name: 0.0}, seed=SEED, num_inference_steps=STEPS)
            assert all(map(torch.equal, denoiser_record.outputs, base_outputs)), name
            assert zero.image.tobytes() == plain.image.tobytes()


def _batches_of_two() -> float:
    return REGISTRY.get_sample_value("loraplex_executor_batches_total", {"batch_size": "2"}) or 0.0


def test_requests_with_different_adapters_share_batches_and_each_gets_its_own_image(
    pair: Pair, denoiser_record: DenoiserRecord
) -> None:
    choices: list[dict[str, float]] = [{}, {NAMES[0]: 1.0}, {NAMES[1]: 0.8}, {NAMES[2]: 1.0, NAMES[3]: 0.5}]

    def generate(adapters: dict[str, float]) -> Image.Image:
        with pair.client() as client:
            return client.generate_image(PROMPT, adapters=adapters, seed=SEED, num_inference_steps=STEPS).image

    before = _batches_of_two()
    with ThreadPoolExecutor(len(choices)) as pool:
        images = list(pool.map(generate, choices))
    assert _batches_of_two() > before
    for image, choice in zip(images, choices, strict=True):
        reference = Reference({_file(name): strength for name, strength in choice.items()})
        assert largest_pixel_difference(image, reference.generate(PROMPT, SEED, STEPS)) <= 1, choice
        for expected in reference.outputs:
            assert min(relative_error(ours, expected) for ours in denoiser_record.outputs) < TOLERANCE, choice


def test_true_guidance_with_a_negative_prompt_is_that_of_diffusers(pair: Pair) -> None:
    guidance = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    with pair.client() as client:
        result = client.generate_image(PROMPT, adapters=[NAMES[0]], seed=SEED, num_inference_steps=STEPS, **guidance)
    expected = Reference({FILES[0]: 1.0}).generate(PROMPT, SEED, STEPS, **guidance)
    assert largest_pixel_difference(result.image, expected) <= 1


def test_image_i_of_a_request_is_the_image_of_seed_plus_i(pair: Pair) -> None:
    with pair.client() as client:
        many = client.generate_image(PROMPT, adapters=[NAMES[0]], seed=SEED, num_inference_steps=STEPS, num_images=3)
    reference = Reference({FILES[0]: 1.0})
    for index, image in enumerate(many.images):
        assert largest_pixel_difference(image, reference.generate(PROMPT, SEED + index, STEPS)) <= 1


def test_the_base_weights_are_those_of_the_file(pair: Pair) -> None:
    fresh = FluxPipeline.from_pretrained(BASE, dtype=torch.float32)
    for component, model in pair.model.base.adaptable.items():
        ours = {name.replace(".base.", "."): weight for name, weight in model.state_dict().items()}
        theirs = getattr(fresh, component).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), component
