"""What each family would silently ignore or cut off is refused by name, and what it takes is not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.config import ExecutorSettings
from executor.errors import UnsupportedModel
from executor.pipeline import BasePipeline, load
from loraplex.errors import InvalidRequest

from ..samples import parameters
from .tiny import save


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    bases: dict[str, BasePipeline] = {}

    def get(name: str, **options: Any) -> BasePipeline:
        if name not in bases or options:
            settings: dict[str, Any] = {"resolutions": "32x32", "max_sequence_length": 16, "default_num_frames": 5}
            settings |= {"base_model": str(save(name, folder)), **options}
            bases[name] = load(ExecutorSettings(**settings), torch.device("cpu"), torch.float32)
        return bases[name]

    return get


@pytest.mark.parametrize(
    ("family", "fields", "field"),
    [
        ("sd15", {"true_cfg_scale": 4.0}, "true_cfg_scale"),
        ("sd15", {"negative_prompt": "blue", "guidance_scale": 1.0}, "guidance_scale"),
        ("sd15", {"negative_prompt": "blue"}, None),
        ("sd15", {"prompt": "a red circle on a white background " * 2}, "prompt"),  # CLIP reads 12 tokens here
        ("sdxl", {"negative_prompt": "blue", "guidance_scale": 0.5}, "guidance_scale"),
        ("sd3", {"prompt": "a red circle on a white background a cat"}, None),  # T5 reads what CLIP cuts off
        ("flux", {"guidance_scale": 7.0}, None),
        ("schnell", {"guidance_scale": 7.0}, "guidance_scale"),
        ("schnell", {}, None),
        ("flux2_klein", {"negative_prompt": "blue"}, "negative_prompt"),
        ("flux2_klein", {"guidance_scale": 1.0}, None),
        ("qwen_image", {"guidance_scale": 7.0}, "guidance_scale"),
        ("qwen_image", {"negative_prompt": "blue"}, "true_cfg_scale"),
        ("z_image", {"negative_prompt": "blue", "guidance_scale": 0.0}, "guidance_scale"),
        ("z_image", {"negative_prompt": "blue", "guidance_scale": 0.5}, None),
        ("wan", {"num_frames": 5}, None),
        ("wan", {"num_frames": 9}, "num_frames"),  # it would be compiled anew
        ("flux", {"num_frames": 5}, "num_frames"),
    ],
)
def test_a_request_is_refused_by_the_field_that_would_be_ignored(
    loaded: Any, family: str, fields: dict[str, Any], field: str | None
) -> None:
    base = loaded(family, **({"max_sequence_length": 64} if family == "qwen_image" else {}))
    asked = parameters(**{"prompt": "cat", "num_frames": base.num_frames, **fields})
    if field is None:
        base.check(asked)
        return
    with pytest.raises(InvalidRequest) as refused:
        base.check(asked)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("family", "components"),
    [
        ("sd15", ["unet", "text_encoder"]),
        ("sdxl", ["unet", "text_encoder", "text_encoder_2"]),
        ("sd3", ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3"]),
        ("flux", ["transformer", "text_encoder", "text_encoder_2"]),
        ("flux2_klein", ["transformer"]),
        ("qwen_image", ["transformer"]),
        ("z_image", ["transformer"]),
        ("wan", ["transformer"]),
        ("wan22", ["transformer", "transformer_2"]),
    ],
)
def test_text_encoders_are_adapted_in_the_families_that_have_adapters_for_them(
    loaded: Any, family: str, components: list[str]
) -> None:
    assert list(loaded(family).adaptable) == components


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("wan", {"resolutions": "24x32"}, "multiples of 16 pixels, not 24x32"),
        ("wan", {"default_num_frames": 6}, "1 frame more than a multiple of 4"),
    ],
)
def test_sizes_that_the_family_cannot_make_are_refused_at_start(
    loaded: Any, family: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        loaded(family, **options)
