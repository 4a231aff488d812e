"""The tables of original names against diffusers' converters of whole base models, which are what its users run on.

A checkpoint in original names whose every row carries its name and number is converted; where a row arrives is where
the same row of B belongs. Every module of the layout must be reached: so no original name is missing or wrong.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils as files

from adapter_store.dialects.names import Names, Target
from adapter_store.dialects.prefixes import split_prefix
from tests.adapter_store.dialects.bases import base
from tests.adapter_store.dialects.original_names import ORIGINAL_NAMES

Checkpoint = dict[str, torch.Tensor]
Converter = Callable[..., Checkpoint]


class Tagged(Checkpoint):
    """A checkpoint that also has whatever norm or position embedding is asked for: no adapter touches those."""

    def pop(self, key: str, *default: Any) -> Any:  # type: ignore[override]
        if key not in self and re.search(r"norm|ln_|pos_embed", key):
            return torch.zeros(2)
        return super().pop(key, *default)


def convert_unet(checkpoint: Checkpoint) -> Checkpoint:
    config = {"layers_per_block": 2, "addition_embed_type": "text_time"}
    if "label_emb.0.0.weight" not in checkpoint:
        config["addition_embed_type"] = None
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in checkpoint.items()}
    return files.convert_ldm_unet_checkpoint(prefixed, config)


CONVERTERS: dict[str, Converter] = {
    "sd1": convert_unet,
    "sd2": convert_unet,
    "sdxl": convert_unet,
    "sdxl-refiner": convert_unet,
    "sd3": files.convert_sd3_transformer_checkpoint_to_diffusers,
    "flux-kontext": files.convert_flux_transformer_checkpoint_to_diffusers,
    "flux2": files.convert_flux2_transformer_checkpoint_to_diffusers,
    "z-image": files.convert_z_image_transformer_checkpoint_to_diffusers,
    "wan": files.convert_wan_transformer_to_diffusers,
    "wan-i2v": files.convert_wan_transformer_to_diffusers,
    "wan-vace": files.convert_wan_transformer_to_diffusers,
    "hunyuan-video": files.convert_hunyuan_video_transformer_to_diffusers,
    "ltx": files.convert_ltx_transformer_checkpoint_to_diffusers,
}


def rows_reached(names: list[str], targets: list[Target]) -> dict[int, torch.Tensor]:
    """For every module the tags of its rows, by our table."""
    reached: dict[int, dict[int, int]] = {}
    for number, target in enumerate(targets):
        for share in target.shares:
            rows = [row for part in share.rows for row in range(part.start, part.stop)]
            for offset, row in enumerate(rows):
                reached.setdefault(share.module, {})[share.start + offset] = tag(number, row)
    return {module: torch.tensor([rows[row] for row in range(len(rows))]) for module, rows in reached.items()}


def tag(number: int, row: int) -> int:
    return number << 20 | row


def find(names: Names, original: str, flat: bool = False) -> Target:
    stem = f"lora_unet_{original.replace('.', '_')}" if flat else f"diffusion_model.{original}"
    return names.find(split_prefix(stem), stem)


@pytest.mark.parametrize("name", CONVERTERS)
def test_every_row_goes_where_diffusers_puts_the_same_row_of_the_base_model(name: str):
    layout, originals = base(name), ORIGINAL_NAMES[name]()
    names = Names(layout)
    targets = [find(names, original) for original in originals]
    assert targets == [find(names, original, flat=True) for original in originals]
    checkpoint = Tagged()
    for number, (original, target) in enumerate(zip(originals, targets, strict=True)):
        tags = torch.tensor([tag(number, row) for row in range(target.out_features)])
        checkpoint[f"{original}.weight"], checkpoint[f"{original}.bias"] = tags[:, None], tags
    converted = CONVERTERS[name](checkpoint)
    denoiser = layout.modules[0].component
    ours = rows_reached(originals, targets)
    for index, module in enumerate(layout.modules):
        if module.component == denoiser:
            weight = converted.get(f"{module.name}.weight")
            assert weight is not None, f"diffusers puts nothing at {module.name}"
            assert len(weight) == module.out_features
            assert torch.equal(weight.flatten(), ours[index]), module.name
    assert set(ours) == {index for index, one in enumerate(layout.modules) if one.component == denoiser}


def test_every_row_of_ltx2_goes_where_diffusers_puts_it():
    """LTX-2 apart: diffusers converts 2.0 alone, so 2.3's modulations of the prompt are not in the comparison."""
    layout, originals = base("ltx2"), ORIGINAL_NAMES["ltx2"]()
    names = Names(layout)
    targets = [find(names, original) for original in originals]
    checkpoint = {f"{original}.weight": torch.full((1, 1), number) for number, original in enumerate(originals)}
    converted = files.convert_ltx2_transformer_to_diffusers(checkpoint)
    ours = {layout.modules[one.shares[0].module].name: number for number, one in enumerate(targets)}
    assert {f"{name}.weight": number for name, number in ours.items()} == {
        name: int(tensor) for name, tensor in converted.items()
    }
    assert {one.name for one in layout.modules if "prompt" not in one.name} == set(ours)
