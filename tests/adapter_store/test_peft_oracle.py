"""Adapters that peft and diffusers themselves wrote: the packed rows equal what peft computes for each module."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from adapter_store import pack
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import Float64, assert_equal, pack_file, unpack

pytestmark = pytest.mark.slow

TARGETS = ["to_q", "to_k", "ff.net.0.proj", "proj_out", "norm.linear", "x_embedder"]


def build_model() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def layout_of(model: torch.nn.Module) -> Layout:
    linears = [(name, one) for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    modules = (TargetModule("transformer", name, "linear", one.in_features, one.out_features) for name, one in linears)
    return Layout("tiny/flux", "FluxPipeline", "F32", tuple(modules))


def randomise(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter)


def computed_by_peft(model: torch.nn.Module, prefix: str = "") -> dict[str, Float64]:
    adapted = {name: one for name, one in model.named_modules() if hasattr(one, "get_delta_weight")}
    return {
        f"transformer.{name.removeprefix(prefix)}": one.get_delta_weight("default").detach().double().numpy()
        for name, one in adapted.items()
    }


def packed_deltas(source: Path, layout: Layout, config: bytes | None = None) -> dict[str, Float64]:
    packed = source.with_name("packed")
    packed.unlink(missing_ok=True)
    pack_file(source, layout, config).write(pack.Origin("0" * 64), packed)
    return unpack(packed)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_what_diffusers_saves_with_its_metadata(tmp_path: Path, use_rslora: bool):
    model = build_model()
    layout = layout_of(model)
    patterns = {"alpha_pattern": {"x_embedder": 3}, "rank_pattern": {"proj_out": 2}}
    config = LoraConfig(r=4, lora_alpha=8, use_rslora=use_rslora, target_modules=TARGETS, **patterns)
    model.add_adapter(config)
    randomise(model)
    FluxPipeline.save_lora_weights(
        tmp_path, get_peft_model_state_dict(model), transformer_lora_adapter_metadata=config.to_dict()
    )
    got = packed_deltas(tmp_path / "pytorch_lora_weights.safetensors", layout)
    assert_equal(got, computed_by_peft(model))


def test_what_peft_saves_with_its_config_beside_it(tmp_path: Path):
    model = build_model()
    layout = layout_of(model)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS))
    randomise(wrapped)
    wrapped.save_pretrained(tmp_path)
    config = (tmp_path / "adapter_config.json").read_bytes()
    expected = computed_by_peft(wrapped, "base_model.model.")
    assert_equal(packed_deltas(tmp_path / "adapter_model.safetensors", layout, config), expected)
    without = packed_deltas(tmp_path / "adapter_model.safetensors", layout)
    assert all(np.allclose(4 * without[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
