"""From the message of a request to checked parameters."""

import math
from collections.abc import Callable

import pytest

from executor.config import ExecutorSettings
from executor.jobs import AdapterChoice
from executor.requests import MAX_SEED, check_request
from loraplex.errors import InvalidRequest, TooManyRows
from loraplex.v1 import executor_pb2 as pb

SETTINGS = ExecutorSettings(
    base_model="m",
    resolutions="64x64,128x64",  # type: ignore[arg-type]
    default_num_inference_steps=28,
    max_num_inference_steps=20,
    max_num_images=3,
)


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "a cat", **fields})  # type: ignore[arg-type]


def adapter(ref: str = "a", **fields: float) -> pb.AdapterSelection:
    return pb.AdapterSelection(ref=ref, **fields)


def test_defaults_are_filled_in() -> None:
    checked = check_request(request(), SETTINGS)
    assert (checked.width, checked.height) == (64, 64)
    assert checked.num_inference_steps == 20  # the default, but not above the largest
    assert (checked.guidance_scale, checked.true_cfg_scale, checked.num_images) == (3.5, 1.0, 1)
    assert (checked.image_format, checked.adapters, checked.negative_prompt) == ("PNG", (), "")


def test_a_seed_is_made_up_when_there_is_none_and_kept_when_it_is_zero() -> None:
    seeds = {check_request(request(), SETTINGS).seed for _ in range(8)}
    assert len(seeds) > 1
    assert check_request(request(seed=0), SETTINGS).seed == 0
    assert check_request(request(seed=MAX_SEED - 3, num_images=3), SETTINGS).seed == MAX_SEED - 3


def test_adapters_keep_their_order_and_strength() -> None:
    checked = check_request(
        request(adapters=[adapter("b", strength=-0.5), adapter("a"), adapter("c", strength=0)]), SETTINGS
    )
    assert checked.adapters == (AdapterChoice("b", -0.5), AdapterChoice("a", 1.0), AdapterChoice("c", 0.0))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: pb.GenerateRequest(), "prompt"),
        (lambda: request(prompt=" \n"), "prompt"),
        (lambda: request(prompt="x" * 10_001), "prompt"),
        (lambda: request(negative_prompt="x" * 10_001), "negative_prompt"),
        (lambda: request(adapters=[adapter(""), adapter("a")]), "adapters[0].ref"),
        (lambda: request(adapters=[adapter("a"), adapter("  ")]), "adapters[1].ref"),
        (lambda: request(adapters=[adapter("x" * 1001)]), "adapters[0].ref"),
        (lambda: request(adapters=[adapter("a"), adapter("b"), adapter("a", strength=0.5)]), "adapters[2].ref"),
        (lambda: request(adapters=[adapter("a", strength=math.nan)]), "adapters[0].strength"),
        (lambda: request(adapters=[adapter("a", strength=-math.inf)]), "adapters[0].strength"),
        (lambda: request(adapters=[adapter("a", strength=100.1)]), "adapters[0].strength"),
        (lambda: request(seed=-1), "seed"),
        (lambda: request(seed=MAX_SEED), "seed"),
        (lambda: request(width=65), "width"),
        (lambda: request(height=128), "height"),
        (lambda: request(width=64, height=128), "height"),
        (lambda: request(width=0), "width"),
        (lambda: request(num_inference_steps=0), "num_inference_steps"),
        (lambda: request(num_inference_steps=21), "num_inference_steps"),
        (lambda: request(guidance_scale=math.nan), "guidance_scale"),
        (lambda: request(guidance_scale=-0.1), "guidance_scale"),
        (lambda: request(guidance_scale=math.inf), "guidance_scale"),
        (lambda: request(true_cfg_scale=101), "true_cfg_scale"),
        (lambda: request(num_images=0), "num_images"),
        (lambda: request(num_images=4), "num_images"),
        (lambda: request(num_images=-(2**31)), "num_images"),
        (lambda: request(output_format=9), "output_format"),
    ],
)
def test_a_wrong_field_is_named_with_a_remedy(make: Callable[[], pb.GenerateRequest], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request(make(), SETTINGS)
    assert refused.value.field == field
    assert refused.value.remedy


def test_more_adapters_than_rows_are_refused_before_anything_is_fetched() -> None:
    many = [adapter(f"a{number}") for number in range(SETTINGS.rows_per_sample + 1)]
    with pytest.raises(TooManyRows) as refused:
        check_request(request(adapters=many), SETTINGS)
    assert refused.value.field == "adapters"
    check_request(request(adapters=many[1:]), SETTINGS)


def test_both_served_resolutions_are_accepted() -> None:
    checked = check_request(request(width=128), SETTINGS)
    assert (checked.width, checked.height) == (128, 64)
