"""The keys and shapes of real files, filled with random numbers: packed with every tensor accounted for, or refused."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from adapter_store.bases import candidates
from adapter_store.convert import Conversion, convert
from adapter_store.groups import read_groups
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout
from tests.adapter_store.samples import Tensors, numbers, pack_file, write_adapter

LISTINGS = Path(__file__).parents[1] / "fixtures" / "listings"

# Real widths are multiples of 96 (3072 = 96 * 32); ranks and the few odd widths are not, and stay.
SHRINK = 96


def shrunk(size: int) -> int:
    return size // SHRINK if size % SHRINK == 0 else size


def shrunk_layout(name: str) -> Layout:
    """A base of the catalogue with every width that is a multiple of 96 divided by it."""
    layout = candidates()[name]
    modules = tuple(
        dataclasses.replace(one, in_features=shrunk(one.in_features), out_features=shrunk(one.out_features))
        for one in layout.modules
    )
    return dataclasses.replace(layout, modules=modules)


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
    layout, tensors = shrunk_layout("flux.1-dev"), read_listing(name)
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
        pack_file(path, shrunk_layout("flux.1-dev"))
    assert refused.value.cause == cause
    assert word in refused.value.message


def test_a_qwen_image_listing_is_packed_for_its_base(tmp_path: Path):
    layout = shrunk_layout("qwen-image")
    packed = pack_file(write_adapter(tmp_path / "a.safetensors", read_listing("qwen_image_excerpt")), layout)
    assert packed.ranks == (32, 32, 32)  # 64 in the file, and no more than the shrunk modules are wide


def test_a_qwen_image_listing_does_not_fit_flux_beyond_the_blocks_that_flux_has(tmp_path: Path):
    tensors = {key.replace("blocks.1.", "blocks.59."): one for key, one in read_listing("qwen_image_excerpt").items()}
    with pytest.raises(AdapterRejected, match=r"blocks\.59") as refused:
        pack_file(write_adapter(tmp_path / "a.safetensors", tensors), shrunk_layout("flux.1-dev"))
    assert refused.value.cause == "UNKNOWN_MODULE"


def write_sparse(path: Path, name: str) -> Path:
    """A listing at its real size: alphas, and for the matrices zeros that take no place on the disk."""
    shapes = json.loads((LISTINGS / f"{name}.json").read_text())
    header, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for key, entry in header.items():
            if key.endswith(".alpha"):
                file.seek(8 + len(text) + entry["data_offsets"][0])
                file.write(b"\x00\x41")  # 8.0
    return path


def convert_sparse(folder: Path, name: str, base: str) -> tuple[Conversion, set[str]]:
    """A listing at its real size, fitted to a base at its real size; and all its keys."""
    with open_file(write_sparse(folder / "a.safetensors", name), 1 << 34) as file:
        return convert(file, read_groups(file), candidates()[base], {}), set(file.tensors)


@pytest.mark.parametrize(
    ("name", "base", "modules"),
    [
        ("flux1_base_model_prefix", "flux.1-dev", 381),
        ("flux1_diffusers", "flux.1-dev", 494),
        ("flux1_diffusers", "flux.1-kontext-dev", 494),
        ("flux1_kohya", "flux.1-dev", 494),
        ("flux1_kohya", "flux.1-schnell", 494),
        ("flux1_xlabs_excerpt", "flux.1-dev", 24),  # 8 modules of each of 3 double blocks
        ("qwen_image_excerpt", "qwen-image", 3),
        ("qwen_image_excerpt", "qwen-image-edit", 3),
    ],
)
def test_a_listing_has_the_shapes_of_its_base(tmp_path: Path, name: str, base: str, modules: int):
    conversion, keys = convert_sparse(tmp_path, name, base)
    assert set(conversion.accounting.applied) == keys
    assert len(conversion.placed) == modules


OTHER_FAMILIES = [name for name in candidates() if not name.startswith("flux.1") and name != "hunyuan-video"]


@pytest.mark.parametrize("base", OTHER_FAMILIES)
@pytest.mark.parametrize("name", ["flux1_diffusers", "flux1_kohya"])
def test_a_flux_listing_fits_no_base_of_another_family(tmp_path: Path, name: str, base: str):
    with pytest.raises(AdapterRejected):
        convert_sparse(tmp_path, name, base)


@pytest.mark.parametrize("name", ["flux1_diffusers", "flux1_kohya"])
def test_a_flux_listing_of_blocks_alone_cannot_be_told_from_one_for_hunyuan_video(tmp_path: Path, name: str):
    """HunyuanVideo has Flux.1's blocks, one and two more of them, with the shapes and, in diffusers and ComfyUI, the
    names of Flux.1's: nothing in such a file says that it is for another model."""
    conversion, keys = convert_sparse(tmp_path, name, "hunyuan-video")
    assert set(conversion.accounting.applied) == keys


def test_a_control_lora_at_its_real_size_is_refused_by_name(tmp_path: Path):
    with pytest.raises(AdapterRejected) as refused:
        convert_sparse(tmp_path, "flux1_bfl_control_refuse", "flux.1-dev")
    assert refused.value.cause == "CONTROL_LORA"
