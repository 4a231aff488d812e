"""The keys and shapes of real files, filled with random numbers: packed with every tensor accounted for, or refused."""

import json
from pathlib import Path

import pytest
import torch

from adapter_store.convert import convert
from adapter_store.groups import read_groups
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import Tensors, flux_modules, numbers, pack_file, write_adapter

LISTINGS = Path(__file__).parents[1] / "fixtures" / "listings"

# Real widths are multiples of 96 (3072 = 96 * 32); ranks and the few odd widths are not, and stay.
SHRINK = 96


def shrunk(size: int) -> int:
    return size // SHRINK if size % SHRINK == 0 else size


def flux_dev_layout() -> Layout:
    """FLUX.1-dev's transformer with every width that is a multiple of 96 divided by it."""
    odd_inputs = {"context_embedder": 4096, "x_embedder": 64, "time_text_embed.text_embedder.linear_1": 768}
    rows = flux_modules(3072, double=19, single=38)
    modules = []
    for name, inputs, outputs in rows:
        inputs = odd_inputs.get(name, 3072 if "time_text_embed" in name and "linear_2" in name else inputs)
        outputs = 64 if name == "proj_out" else 3072 if "time_text_embed" in name else outputs
        modules.append(TargetModule("transformer", name, "linear", shrunk(inputs), shrunk(outputs)))
    return Layout("tiny/flux-dev", "FluxPipeline", "BF16", tuple(modules))


def read_listing(name: str) -> Tensors:
    shapes = json.loads((LISTINGS / f"{name}.json").read_text())
    return {
        key: numbers(*map(shrunk, shape), seed=index) if shape else torch.tensor(8.0)
        for index, (key, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize(
    ("name", "modules", "dialect"),
    [
        ("flux1_base_model_prefix", 381, "peft"),
        ("flux1_diffusers", 494, "peft"),
        ("flux1_kohya", 494, "kohya"),
        ("flux1_xlabs_excerpt", None, "xlabs"),
    ],
)
def test_a_real_listing_is_packed_with_every_tensor_accounted_for(
    tmp_path: Path, name: str, modules: int | None, dialect: str
):
    layout, tensors = flux_dev_layout(), read_listing(name)
    path = write_adapter(tmp_path / "a.safetensors", tensors)
    with open_file(path, 1 << 30) as file:
        found = read_groups(file)
        conversion = convert(file, found, layout, {})
    assert set(conversion.accounting.applied) == set(tensors)
    assert found.dialects == (dialect,)
    placed = conversion.placed
    assert {group for one in placed for group in one.groups} == set(found.groups)
    if modules is not None:
        assert len(placed) == modules
    packed = pack_file(path, layout)
    assert packed.rank == max(group.sizes.rank for group in found.groups)


@pytest.mark.parametrize(
    ("name", "cause", "word"),
    [
        ("flux1_bfl_control_refuse", "CONTROL_LORA", "control LoRA"),
        ("flux1_bfl_lokr_excerpt", "SHAPE_MISMATCH", "part of a difference"),
    ],
)
def test_a_real_listing_that_does_not_fit_is_refused_by_its_right_name(
    tmp_path: Path, name: str, cause: str, word: str
):
    path = write_adapter(tmp_path / "a.safetensors", read_listing(name))
    with pytest.raises(AdapterRejected) as refused:
        pack_file(path, flux_dev_layout())
    assert refused.value.cause == cause
    assert word in refused.value.message


def test_a_qwen_image_listing_is_packed_for_a_layout_with_its_names(tmp_path: Path):
    names = [f"transformer_blocks.{block}.attn.{name}" for block in (0, 1) for name in ("to_q", "to_k")]
    modules = tuple(TargetModule("transformer", name, "linear", 32, 32) for name in names)
    layout = Layout("tiny/qwen", "QwenImagePipeline", "BF16", modules)
    packed = pack_file(write_adapter(tmp_path / "a.safetensors", read_listing("qwen_image_excerpt")), layout)
    assert packed.ranks == (32, 32, 32)  # 64 in the file, and no more than the shrunk modules are wide


def test_a_qwen_image_listing_does_not_fit_flux_beyond_the_blocks_that_flux_has(tmp_path: Path):
    tensors = {key.replace("blocks.1.", "blocks.59."): one for key, one in read_listing("qwen_image_excerpt").items()}
    with pytest.raises(AdapterRejected, match=r"blocks\.59") as refused:
        pack_file(write_adapter(tmp_path / "a.safetensors", tensors), flux_dev_layout())
    assert refused.value.cause == "UNKNOWN_MODULE"
