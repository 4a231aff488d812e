"""A request whose adapter fails gets its typed error and nothing else changes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.errors import (
    AdapterNotFound,
    AdapterRejected,
    InvalidAdapterRef,
    InvalidRequest,
    ServiceError,
    TooManyRows,
)
from tests.e2e.pair import ADAPTERS, Pair
from tests.e2e.test_numbers import NAMES, PROMPT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TO_Q = "transformer.transformer_blocks.0.attn.to_q"


def _pair(name: str, rank: int = 4, width: int = 128) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A.weight": torch.randn(rank, width), f"{name}.lora_B.weight": torch.randn(width, rank)}


def _not_a_number() -> dict[str, torch.Tensor]:
    tensors = _pair(TO_Q)
    tensors[f"{TO_Q}.lora_A.weight"][1, 2] = torch.nan
    return tensors


def _half_a_pair() -> dict[str, torch.Tensor]:
    tensors = _pair(TO_Q)
    del tensors[f"{TO_Q}.lora_B.weight"]
    return tensors


def _write_html(file: Path) -> None:
    file.write_text("<!DOCTYPE html><html><body>Sign in</body></html>")


BAD_FILES: dict[str, Callable[[Path], None]] = {
    "not-finite": lambda file: save_file(_not_a_number(), file),
    "half-a-pair": lambda file: save_file(_half_a_pair(), file),
    "wrong-base": lambda file: save_file(_pair("unet.down_blocks.0.attentions.0.proj_in", width=320), file),
    "wrong-width": lambda file: save_file(_pair(TO_Q, width=96), file),
    "unknown-module": lambda file: save_file(
        _pair(TO_Q) | _pair("transformer.transformer_blocks.0.attn.to_nowhere"), file
    ),
    "html": _write_html,
}


def _state(pair: Pair) -> tuple[list[tuple[str, int]], int]:
    with pair.client() as client:
        residents = client.residents()
    return sorted((one.digest, one.pins) for one in residents.adapters), residents.free_rows


def _pixels(pair: Pair, adapters: dict[str, float]) -> bytes:
    with pair.client() as client:
        return client.generate_image(PROMPT, adapters=adapters, seed=3, num_inference_steps=3).image.tobytes()


def _fails(pair: Pair, error: type[ServiceError], adapters: dict[str, float]) -> ServiceError:
    events = []
    with pair.client() as client, pytest.raises(error) as caught:
        events += client.generate(PROMPT, adapters=adapters, seed=3, num_inference_steps=3)
    assert not [event for event in events if type(event).__name__ in ("StepDone", "Image", "Summary")]
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_refused_and_leaves_everything_as_it_was(pair: Pair, kind: str) -> None:
    BAD_FILES[kind](pair.root / f"{kind}.safetensors")
    good = {NAMES[0]: 0.9}
    expected = _pixels(pair, good)
    before = _state(pair)
    for adapters in ({kind: 1.0}, {NAMES[1]: 1.0, kind: 1.0}):
        error = _fails(pair, AdapterRejected, adapters)
        assert isinstance(error, AdapterRejected)
        assert error.cause
        assert error.key or kind == "html"
        assert _state(pair) == before
    assert _pixels(pair, good) == expected


@pytest.mark.parametrize(
    ("ref", "error"),
    [("no-such-adapter", AdapterNotFound), ("../base/model", InvalidAdapterRef), ("/etc/passwd", InvalidAdapterRef)],
)
def test_an_unknown_or_forbidden_reference_is_refused_by_name(pair: Pair, ref: str, error: type[ServiceError]) -> None:
    before = _state(pair)
    _fails(pair, error, {ref: 1.0})
    assert _state(pair) == before


def test_more_rows_than_a_sample_has_are_refused(pair: Pair) -> None:
    save_file(_pair(TO_Q, rank=33), pair.root / "wide.safetensors")
    before = _state(pair)
    error = _fails(pair, TooManyRows, {"wide": 1.0})
    assert "33" in error.message
    assert "32" in error.message
    assert _state(pair) == before


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("width", {"width": 96}),
        ("num_inference_steps", {"num_inference_steps": 0}),
        ("num_images", {"num_images": 99}),
        ("true_cfg_scale", {"negative_prompt": "a cat"}),
        ("seed", {"seed": -1}),
        ("adapters[0].strength", {"adapters": {"x": float("nan")}}),
    ],
)
def test_a_wrong_field_is_named(pair: Pair, field: str, options: dict[str, object]) -> None:
    with pair.client() as client, pytest.raises(InvalidRequest) as caught:
        list(client.generate(PROMPT, **options))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_changed_file_is_another_adapter(pair: Pair) -> None:
    first, second = (ADAPTERS / f"{name}.safetensors" for name in NAMES[:2])
    target = pair.root / "changing.safetensors"
    target.write_bytes(first.read_bytes())
    assert _pixels(pair, {"changing": 1.0}) == _pixels(pair, {NAMES[0]: 1.0})
    target.write_bytes(second.read_bytes())
    assert _pixels(pair, {"changing": 1.0}) == _pixels(pair, {NAMES[1]: 1.0})
