"""From packed rows back to an ordinary adapter file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapter_store import pack
from adapter_store.unpack import unpack
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout
from tests.adapter_store.samples import (
    WIDTH,
    Tensors,
    delta,
    flux_layout,
    kohya,
    numbers,
    pack_file,
    peft,
    unet_layout,
    write_adapter,
)


def packed(folder: Path, layout: Layout, tensors: Tensors) -> Path:
    path = folder / "packed.safetensors"
    pack_file(write_adapter(folder / "a.safetensors", tensors), layout).write(pack.Origin("0" * 64), path)
    return path


def test_an_unpacked_adapter_has_pefts_names_and_the_scaling_in_B(tmp_path: Path):
    tensors = kohya("lora_unet_double_blocks_0_img_attn_proj", WIDTH, WIDTH, 4, alpha=2)
    unpack(packed(tmp_path, flux_layout(), tensors), tmp_path / "out.safetensors")
    got = load_file(tmp_path / "out.safetensors")
    name = "transformer.transformer_blocks.0.attn.to_out.0"
    assert list(got) == [f"{name}.lora_A.weight", f"{name}.lora_B.weight"]
    assert torch.equal(
        got[f"{name}.lora_A.weight"], tensors["lora_unet_double_blocks_0_img_attn_proj.lora_down.weight"]
    )
    expected = delta(tensors, "lora_unet_double_blocks_0_img_attn_proj", 0.5)
    assert abs(delta(got, name) - expected).max() < 1e-6


def test_modules_keep_their_own_ranks(tmp_path: Path):
    tensors = peft("transformer.proj_out", 4, WIDTH, 2) | peft("transformer.x_embedder", WIDTH, 4, 3)
    unpack(packed(tmp_path, flux_layout("BF16"), tensors), tmp_path / "out.safetensors")
    got = load_file(tmp_path / "out.safetensors")
    assert set(got) == set(tensors)
    assert all(torch.equal(got[name], tensors[name].bfloat16()) for name in tensors)


def test_a_convolution_comes_back_with_its_kernel(tmp_path: Path):
    name = "unet.down_blocks.0.resnets.0.conv1"
    tensors = {f"{name}.lora_A.weight": numbers(2, 8, 3, 3), f"{name}.lora_B.weight": numbers(16, 2, 1, 1)}
    unpack(packed(tmp_path, unet_layout(), tensors), tmp_path / "out.safetensors")
    got = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(got[key], tensors[key]) for key in tensors)


def test_packing_what_was_unpacked_gives_the_same_rows(tmp_path: Path):
    tensors = peft("transformer.proj_out", 4, WIDTH, 2) | peft("text_encoder.encoder.layers.0.mlp.fc1", 96, 24, 5)
    first = packed(tmp_path, flux_layout("F16"), tensors)
    unpack(first, tmp_path / "out.safetensors")
    again = pack_file(tmp_path / "out.safetensors", flux_layout("F16"))
    assert (again.rows == pack_file(tmp_path / "a.safetensors", flux_layout("F16")).rows).all()


def test_a_file_that_is_not_packed_is_refused_and_the_output_stays(tmp_path: Path):
    source = write_adapter(tmp_path / "a.safetensors", peft("transformer.proj_out", 4, WIDTH, 2))
    output = tmp_path / "out.safetensors"
    output.write_bytes(b"mine")
    with pytest.raises(AdapterRejected, match="no packed adapter"):
        unpack(source, output)
    assert output.read_bytes() == b"mine"
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "out.safetensors"}


@pytest.mark.parametrize("ranks", ["[1, 2]", "[9]", "nonsense", "[null]"])
def test_a_packed_file_whose_metadata_lie_is_refused(tmp_path: Path, ranks: str):
    good = packed(tmp_path, flux_layout(), peft("transformer.proj_out", 4, WIDTH, 2))
    tensors = load_file(good)
    metadata = {"format": "loraplex-packed/1", "ranks": ranks, "modules": '[[0,"transformer.a","linear",32,4,1,1]]'}
    with pytest.raises(AdapterRejected, match="do not fit"):
        unpack(write_adapter(tmp_path / "bad.safetensors", tensors, metadata), tmp_path / "out.safetensors")
