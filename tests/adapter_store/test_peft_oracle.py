"""Adapters that peft and diffusers themselves wrote: the packed rows equal what peft computes for each module."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict

from adapter_store import pack
from loraplex.errors import AdapterRejected
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


class Convolutions(torch.nn.Module):
    """A linear layer and convolutions of every kind that has files."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = torch.nn.Linear(24, 36)
        self.conv1 = torch.nn.Conv2d(12, 20, 3)
        self.conv2 = torch.nn.Conv2d(18, 8, (3, 1))
        self.proj_in = torch.nn.Conv2d(16, 24, 1)


def convolutions_layout(model: torch.nn.Module) -> Layout:
    modules = (
        TargetModule("transformer", name, "conv2d", one.in_channels, one.out_channels, one.kernel_size)  # type: ignore[arg-type]
        if isinstance(one, torch.nn.Conv2d)
        else TargetModule("transformer", name, "linear", one.in_features, one.out_features)  # type: ignore[arg-type]
        for name, one in model.named_children()
    )
    return Layout("tiny/convolutions", "Other", "F32", tuple(modules))


def layout_of(model: torch.nn.Module) -> Layout:
    linears = [(name, one) for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    modules = (TargetModule("transformer", name, "linear", one.in_features, one.out_features) for name, one in linears)
    return Layout("tiny/flux", "FluxPipeline", "F32", tuple(modules))


def randomise(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if any(mark in name for mark in (".lora_", ".hada_", ".lokr_")):
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


PATTERNS = {"rank_pattern": {"proj_in": 2, "^to_q": 3}, "alpha_pattern": {"conv1": 5, "to_q": 0.5}}
LYCORIS = [
    LoHaConfig(r=4, alpha=6),
    LoHaConfig(r=4, alpha=6, use_effective_conv2d=True, **PATTERNS),
    LoKrConfig(r=2, alpha=3),
    LoKrConfig(r=2, alpha=3, decompose_both=True, decompose_factor=4),
    LoKrConfig(r=2, alpha=3, use_effective_conv2d=True, decompose_both=True),
    LoKrConfig(r=2, alpha=3, use_effective_conv2d=True, decompose_factor=6, **PATTERNS),
    LoKrConfig(r=64, alpha=16),  # both factors whole: to peft the scaling is 1/4, to LyCORIS 1
    LoKrConfig(),
]


def saved_by_peft(folder: Path, config: PeftConfig) -> tuple[Layout, dict[str, Float64]]:
    """The layout, and what peft computes in fp64 for the adapter that it saved to `folder`."""
    torch.manual_seed(0)
    model = Convolutions()
    layout = convolutions_layout(model)
    config.target_modules = ["to_q", "conv1", "conv2", "proj_in"]
    wrapped = get_peft_model(model, config)
    randomise(wrapped)
    wrapped.save_pretrained(folder)
    expected = computed_by_peft(wrapped.double(), "base_model.model.")
    return layout, {name: delta.reshape(len(delta), -1) for name, delta in expected.items()}


@pytest.mark.parametrize("config", LYCORIS, ids=lambda config: f"{config.peft_type.value} r={config.r}")
def test_pefts_own_loha_and_lokr_are_what_peft_computes(tmp_path: Path, config: PeftConfig):
    layout, expected = saved_by_peft(tmp_path, config)
    noted = (tmp_path / "adapter_config.json").read_bytes()
    assert_equal(packed_deltas(tmp_path / "adapter_model.safetensors", layout, noted), expected)


def test_a_config_that_is_about_another_algorithm_or_rank_is_refused(tmp_path: Path):
    layout, _ = saved_by_peft(tmp_path, LoHaConfig(r=4, alpha=6))
    noted = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, cause in (
        ({"peft_type": "LOKR"}, "METADATA_INVALID"),
        ({"r": 3}, "ALPHA_CONFLICT"),
        ({"alpha": 0}, "ALPHA_INVALID"),
        ({"alpha_pattern": {"nowhere": 3}}, "METADATA_INVALID"),
        ({"peft_type": "OFT"}, "UNSUPPORTED_ALGORITHM"),
    ):
        with pytest.raises(AdapterRejected) as refused:
            packed_deltas(tmp_path / "adapter_model.safetensors", layout, json.dumps(noted | change).encode())
        assert refused.value.cause == cause
    layout, _ = saved_by_peft(tmp_path, LoKrConfig(r=64, alpha=16))
    noted = json.loads((tmp_path / "adapter_config.json").read_text())
    with pytest.raises(AdapterRejected) as refused:
        packed_deltas(tmp_path / "adapter_model.safetensors", layout, json.dumps(noted | {"r": 0}).encode())
    assert refused.value.cause == "ALPHA_INVALID"
