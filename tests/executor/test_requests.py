"""From the message of a request to checked parameters."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from executor.config import ExecutorSettings
from executor.jobs import AdapterChoice
from executor.requests import MAX_SEED, Served, check_cancelled_id, check_priority, check_request
from loraplex.errors import InvalidRequest, TooManyRows
from loraplex.pack_options import PackOptions
from loraplex.v1 import executor_pb2 as pb
from loraplex.v1 import layout_pb2

SETTINGS = ExecutorSettings(
    base_model="m",
    resolutions="64x64,128x64",  # type: ignore[arg-type]
    default_num_inference_steps=20,
    max_num_inference_steps=20,
    max_num_images=3,
    max_image_bytes=1000,
    max_num_frames=9,
    default_num_frames=5,
)

SERVED = Served(
    modes=frozenset({"text_to_image", "image_to_image", "inpaint"}),
    components=frozenset({"transformer", "text_encoder"}),
    image_strengths={"image_to_image": 0.6, "inpaint": 0.9},
    skipped_steps=lambda steps, strength: steps - int(steps * strength),
    previews=True,
)
WITHOUT_IMAGES = replace(SERVED, modes=frozenset({"text_to_image"}), previews=False)
VIDEO = replace(SERVED, modes=frozenset({"text_to_video"}), frames_multiple=4)


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "a cat", **fields})  # type: ignore[arg-type]


def adapter(ref: str = "a", **fields: Any) -> pb.AdapterSelection:
    return pb.AdapterSelection(ref=ref, **fields)


def with_options(**fields: Any) -> pb.GenerateRequest:
    return request(adapters=[adapter(options=layout_pb2.PackOptions(**fields))])


def test_defaults_are_filled_in() -> None:
    checked = check_request(request(), SETTINGS, SERVED)
    assert (checked.width, checked.height) == (64, 64)
    assert checked.num_inference_steps == 20
    assert (checked.guidance_scale, checked.true_cfg_scale, checked.num_images) == (3.5, 1.0, 1)
    assert (checked.image_format, checked.adapters, checked.negative_prompt) == ("PNG", (), "")


def test_a_seed_is_made_up_when_there_is_none_and_kept_when_it_is_zero() -> None:
    seeds = {check_request(request(), SETTINGS, SERVED).seed for _ in range(8)}
    assert len(seeds) > 1
    assert check_request(request(seed=0), SETTINGS, SERVED).seed == 0
    assert check_request(request(seed=MAX_SEED - 3, num_images=3), SETTINGS, SERVED).seed == MAX_SEED - 3


def test_adapters_keep_their_order_and_strength() -> None:
    checked = check_request(
        request(adapters=[adapter("b", strength=-0.5), adapter("a"), adapter("c", strength=0)]), SETTINGS, SERVED
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
        (lambda: request(true_cfg_scale=0.5), "true_cfg_scale"),
        (lambda: request(num_images=0), "num_images"),
        (lambda: request(num_images=4), "num_images"),
        (lambda: request(num_images=-(2**31)), "num_images"),
        (lambda: request(output_format=9), "output_format"),
        (lambda: request(adapters=[adapter(start=-0.1)]), "adapters[0].start"),
        (lambda: request(adapters=[adapter(start=math.nan)]), "adapters[0].start"),
        (lambda: request(adapters=[adapter(start=1.5)]), "adapters[0].start"),
        (lambda: request(adapters=[adapter(end=1.1)]), "adapters[0].end"),
        (lambda: request(adapters=[adapter(end=math.nan)]), "adapters[0].end"),
        (lambda: request(adapters=[adapter(end=0)]), "adapters[0].end"),
        (lambda: request(adapters=[adapter(start=0.5, end=0.5)]), "adapters[0].end"),
        (lambda: request(adapters=[adapter(start=0.6, end=0.5)]), "adapters[0].end"),
        (lambda: request(num_inference_steps=4, adapters=[adapter(start=0.8)]), "adapters[0].start"),
        (lambda: request(num_inference_steps=4, adapters=[adapter(start=0.3, end=0.5)]), "adapters[0].start"),
        (lambda: request(adapters=[adapter(components=["vae"])]), "adapters[0].components"),
        (lambda: request(adapters=[adapter(components=["transformer", ""])]), "adapters[0].components"),
        (lambda: request(adapters=[adapter(end=0.6), adapter(start=0.5)]), "adapters[1].ref"),
        (lambda: request(adapters=[adapter(components=["transformer"]), adapter()]), "adapters[1].ref"),
        (lambda: with_options(waived=[str(number) for number in range(100)]), "adapters[0].options"),
        (lambda: with_options(waived=["x" * 101]), "adapters[0].options"),
        (lambda: with_options(denoiser="x" * 101), "adapters[0].options"),
        (lambda: with_options(max_error=math.nan), "adapters[0].options"),
        (lambda: request(mask_image=b"x"), "mask_image"),
        (lambda: request(image_strength=0.5), "image_strength"),
        (lambda: request(image_strength=0.0), "image_strength"),
        (lambda: request(initial_image=b"x", image_strength=0), "image_strength"),
        (lambda: request(initial_image=b"x", image_strength=1.01), "image_strength"),
        (lambda: request(initial_image=b"x", image_strength=math.nan), "image_strength"),
        (lambda: request(initial_image=b"x", image_strength=0.4, num_inference_steps=2), "image_strength"),
        (lambda: request(initial_image=b"x" * 1001), "initial_image"),
        (lambda: request(initial_image=b"x", mask_image=b"x" * 1001), "mask_image"),
        (lambda: request(num_frames=1), "num_frames"),
        (lambda: request(initial_image=b"x", num_frames=5), "num_frames"),
        (lambda: request(preview_every_steps=-1), "preview_every_steps"),
        (lambda: request(num_inference_steps=4, preview_every_steps=5), "preview_every_steps"),
        (
            lambda: request(initial_image=b"x", image_strength=0.5, num_inference_steps=4, preview_every_steps=3),
            "preview_every_steps",
        ),
    ],
)
def test_a_wrong_field_is_named_with_a_remedy(make: Callable[[], pb.GenerateRequest], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request(make(), SETTINGS, SERVED)
    assert refused.value.field == field
    assert refused.value.remedy


def test_more_adapters_than_rows_are_refused_before_anything_is_fetched() -> None:
    many = [adapter(f"a{number}") for number in range(SETTINGS.rows_per_sample + 1)]
    with pytest.raises(TooManyRows) as refused:
        check_request(request(adapters=many), SETTINGS, SERVED)
    assert refused.value.field == "adapters"
    check_request(request(adapters=many[1:]), SETTINGS, SERVED)


def test_both_served_resolutions_are_accepted() -> None:
    checked = check_request(request(width=128), SETTINGS, SERVED)
    assert (checked.width, checked.height) == (128, 64)


@pytest.mark.parametrize(
    ("served", "fields", "field"),
    [
        (WITHOUT_IMAGES, {"initial_image": b"x"}, "initial_image"),
        (WITHOUT_IMAGES, {"initial_image": b"x", "mask_image": b"x"}, "initial_image"),
        (replace(SERVED, modes=SERVED.modes - {"inpaint"}), {"initial_image": b"x", "mask_image": b"x"}, "mask_image"),
        (WITHOUT_IMAGES, {"preview_every_steps": 1}, "preview_every_steps"),
        (VIDEO, {"initial_image": b"x"}, "initial_image"),
        (VIDEO, {"num_frames": 0}, "num_frames"),
        (VIDEO, {"num_frames": 13}, "num_frames"),
        (VIDEO, {"num_frames": 6}, "num_frames"),  # diffusers would make 5 of it, with a warning
    ],
)
def test_what_the_base_model_does_not_do_is_refused(served: Served, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request(request(**fields), SETTINGS, served)
    assert refused.value.field == field
    assert refused.value.remedy


def test_a_video_has_the_frames_that_were_asked_for_and_an_image_one() -> None:
    assert check_request(request(), SETTINGS, SERVED).num_frames == 1
    assert check_request(request(), SETTINGS, VIDEO).num_frames == 5
    assert check_request(request(num_frames=9), SETTINGS, VIDEO).num_frames == 9


def test_steps_components_and_options_of_an_adapter_are_kept() -> None:
    wire = layout_pb2.PackOptions(denoiser="transformer_2", waived=["norm", "bias"], max_rank=8, max_error=0.1)
    selection = adapter(start=0.25, end=0.5, components=["text_encoder", "transformer"], options=wire)
    (choice,) = check_request(request(adapters=[selection]), SETTINGS, SERVED).adapters
    options = PackOptions(denoiser="transformer_2", waived=("bias", "norm"), max_rank=8, max_error=0.1)
    assert choice == AdapterChoice("a", 1.0, 0.25, 0.5, ("text_encoder", "transformer"), options)


def test_an_adapter_may_have_another_strength_in_other_steps_or_components() -> None:
    steps = [adapter(end=0.5, strength=0.5), adapter(start=0.5, strength=1)]
    assert len(check_request(request(adapters=steps), SETTINGS, SERVED).adapters) == 2
    components = [adapter(components=["transformer"]), adapter(components=["text_encoder"], strength=0.2)]
    assert len(check_request(request(adapters=components), SETTINGS, SERVED).adapters) == 2


def test_an_initial_image_saves_steps_and_the_default_of_its_strength_is_that_of_its_mode() -> None:
    checked = check_request(request(initial_image=b"x", num_inference_steps=10), SETTINGS, SERVED)
    assert (checked.image_strength, checked.num_inference_steps, checked.num_steps) == (0.6, 10, 6)
    inpainted = check_request(request(initial_image=b"x", mask_image=b"x", num_inference_steps=10), SETTINGS, SERVED)
    assert (inpainted.image_strength, inpainted.num_steps) == (0.9, 9)
    plain = check_request(request(num_inference_steps=10), SETTINGS, SERVED)
    assert (plain.image_strength, plain.num_steps) == (0.0, 10)


def test_steps_of_an_adapter_are_those_that_are_run() -> None:
    with pytest.raises(InvalidRequest, match="None of the 2 steps"):
        ranged = [adapter(start=0.6)]
        fields = {"initial_image": b"x", "image_strength": 0.2, "num_inference_steps": 10, "adapters": ranged}
        check_request(request(**fields), SETTINGS, SERVED)


def test_metadata_are_written_unless_the_operator_says_no() -> None:
    assert check_request(request(), SETTINGS, SERVED).metadata
    without = SETTINGS.model_copy(update={"image_metadata": False})
    assert not check_request(request(), without, SERVED).metadata


def test_priorities_are_numbers_and_unknown_ones_are_refused() -> None:
    names = ("UNSPECIFIED", "LOW", "NORMAL", "HIGH")
    values = [pb.Priority.Value(f"PRIORITY_{name}") for name in names]
    assert [check_priority(request(priority=value)) for value in values] == [0, -1, 0, 1]
    with pytest.raises(InvalidRequest) as refused:
        check_priority(request(priority=4))
    assert (refused.value.field, bool(refused.value.remedy)) == ("priority", True)


@pytest.mark.parametrize("text", ["", " ", "a\tb", "x" * 129, "*"])
def test_an_id_that_no_request_can_have_is_not_cancelled(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_cancelled_id(pb.CancelRequest(request_id=text))
    assert refused.value.field == "request_id"


def test_every_field_of_a_request_is_looked_at() -> None:
    """A field that is added to the proto must be served or refused, never ignored: extend this list with the code."""
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == {
        *("prompt", "negative_prompt", "adapters", "seed", "width", "height", "num_inference_steps", "guidance_scale"),
        *("num_images", "output_format", "true_cfg_scale", "num_frames", "initial_image", "mask_image"),
        *("image_strength", "preview_every_steps", "priority"),
    }
    assert {field.name for field in pb.AdapterSelection.DESCRIPTOR.fields} == {
        *("ref", "strength", "start", "end", "components", "options"),
    }
    assert {field.name for field in layout_pb2.PackOptions.DESCRIPTOR.fields} == {
        *("denoiser", "waived", "max_rank", "max_error"),
    }
