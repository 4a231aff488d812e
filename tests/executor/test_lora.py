"""Layers with rank rows against dense merged weights in fp64, and attaching them to real models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.arena import Arena, RowTable
from executor.lora import LoraConv2d, LoraLinear, attach
from loraplex.layout import Layout, TargetModule
from loraplex.targets import read_layout

CPU = torch.device("cpu")
NUM_ROWS, R = 24, 12
# Two adapters mixed in sample 0, in shuffled rows that are not contiguous; another one in sample 1; none in sample 2.
ROWS = {"a": (7, 3, 19, 11), "b": (5, 21, 2), "c": (13, 1, 16, 8, 23)}
SAMPLES: tuple[dict[str, float], ...] = ({"a": 1.0, "b": -0.5}, {"c": 0.7}, {})


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def attached(layer: nn.Module, module: TargetModule, max_batch: int = 3) -> tuple[Any, Arena, RowTable]:
    """`layer` with rank rows, all of them random but the zero row."""
    arena = Arena(Layout("m", "f", "F32", (module,)), NUM_ROWS, CPU)
    arena.rows[1:].normal_()
    table = RowTable(max_batch, R, CPU)
    kind = LoraLinear if module.kind == "linear" else LoraConv2d
    return kind(layer, *arena.views(0), table), arena, table


def select(table: RowTable, samples: tuple[dict[str, float], ...] = SAMPLES) -> None:
    """Select adapters of ROWS by name and strength."""
    table.select([tuple((row, strength) for name, strength in one.items() for row in ROWS[name]) for one in samples])


def merged(layer: Any, lora: Any, sample: dict[str, float]) -> torch.Tensor:
    """W + the sum of strength * B A, in fp64."""
    weight = layer.weight.double()
    for name, strength in sample.items():
        A, B = (view[list(ROWS[name])].double() for view in (lora.lora_A, lora.lora_B))
        weight = weight + strength * (B.T @ A).reshape(weight.shape)
    return weight


@pytest.mark.parametrize("shape", [(3, 6), (3, 5, 6), (3, 2, 4, 6)], ids=["2-D", "3-D", "4-D"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_equals_the_dense_merge_sample_by_sample(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(6, 9, bias=bias)
    lora, _, table = attached(layer, TargetModule("t", "x", "linear", 6, 9))
    select(table)
    x = torch.randn(shape)
    y = lora(x)
    for i, sample in enumerate(SAMPLES):
        b = layer.bias.double() if bias else None
        dense = functional.linear(x[i : i + 1].double(), merged(layer, lora, sample), b)
        torch.testing.assert_close(y[i : i + 1].double(), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 1},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "dilation": 2, "padding": 2},
        {"kernel_size": (1, 3), "padding": (0, 1), "stride": (2, 1)},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": 3, "bias": False},
    ],
    ids=str,
)
def test_a_convolution_equals_the_dense_merge_sample_by_sample(options: dict[str, Any]) -> None:
    layer = nn.Conv2d(4, 5, **options)
    kernel = layer.kernel_size
    lora, _, table = attached(layer, TargetModule("t", "x", "conv2d", 4, 5, (kernel[0], kernel[1])))
    select(table)
    x = torch.randn(3, 4, 8, 8)
    y = lora(x)
    for i, sample in enumerate(SAMPLES):
        dense = functional.conv2d(
            x[i : i + 1].double(),
            merged(layer, lora, sample),
            None if layer.bias is None else layer.bias.double(),
            layer.stride,
            layer.padding,
            layer.dilation,
        )
        torch.testing.assert_close(y[i : i + 1].double(), dense, rtol=1e-4, atol=1e-4)


def linear_and_convolution() -> list[tuple[nn.Module, TargetModule, torch.Tensor]]:
    return [
        (nn.Linear(6, 9), TargetModule("t", "x", "linear", 6, 9), torch.randn(3, 5, 6)),
        (nn.Conv2d(4, 5, 3), TargetModule("t", "x", "conv2d", 4, 5, (3, 3)), torch.randn(3, 4, 8, 8)),
    ]


def test_without_an_adapter_and_at_strength_zero_the_output_is_the_base_bit_for_bit() -> None:
    for layer, module, x in linear_and_convolution():
        lora, _, table = attached(layer, module)
        base = layer(x)
        assert torch.equal(lora(x), base)
        select(table, ({"a": 0.0}, {"b": 0.0, "c": 0.0}, {}))
        assert torch.equal(lora(x), base)
        select(table)
        assert not torch.equal(lora(x), base)
        table.select([(), (), ()])
        assert torch.equal(lora(x), base)


def test_an_adapter_that_is_selected_twice_counts_twice_and_not_more() -> None:
    for layer, module, x in linear_and_convolution():
        lora, _, table = attached(layer, module)
        table.select([tuple((row, 0.5) for row in ROWS["a"] + ROWS["a"])] * 3)
        twice = lora(x)
        select(table, ({"a": 1.0},) * 3)
        torch.testing.assert_close(lora(x), twice, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lora(x), lora(x), rtol=0, atol=0)


def test_broken_numbers_in_rows_that_nobody_selects_do_no_harm() -> None:
    for layer, module, x in linear_and_convolution():
        lora, arena, table = attached(layer, module)
        named = {0, *(row for name in "abc" for row in ROWS[name])}
        arena.rows[[row for row in range(NUM_ROWS) if row not in named]] = torch.nan
        select(table)
        assert lora(x).isfinite().all()


def test_a_sample_does_not_see_the_rows_of_another() -> None:
    for layer, module, x in linear_and_convolution():
        lora, arena, table = attached(layer, module)
        arena.rows[list(ROWS["c"])] = torch.nan  # known failure 143: a poisoned neighbour
        select(table)
        y = lora(x)
        assert y[1].isnan().all()
        assert y[[0, 2]].isfinite().all()


def test_a_smaller_batch_than_the_row_table_uses_its_first_samples() -> None:
    for layer, module, x in linear_and_convolution():
        lora, _, table = attached(layer, module)
        select(table)
        torch.testing.assert_close(lora(x)[:2], lora(x[:2]), rtol=1e-5, atol=1e-5)


def test_a_larger_batch_than_the_row_table_is_an_error_and_not_a_wrong_answer() -> None:
    for layer, module, x in linear_and_convolution():
        lora, _, _ = attached(layer, module, max_batch=2)
        with pytest.raises(RuntimeError):
            lora(x)


def test_rows_keep_their_dtype_and_address_when_the_model_is_cast() -> None:
    for layer, module, x in linear_and_convolution():
        lora, arena, table = attached(layer, module)
        select(table)
        before = lora(x)
        pointers = [arena.rows.data_ptr(), lora.lora_A.data_ptr(), lora.row_index.data_ptr()]
        nn.Sequential(lora).to(torch.bfloat16)
        assert [arena.rows.data_ptr(), lora.lora_A.data_ptr(), lora.row_index.data_ptr()] == pointers
        assert lora.lora_A.dtype is torch.float32
        y = lora(x.bfloat16())
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y.float(), before, rtol=0.1, atol=0.2)


class _Subclass(nn.Linear):
    pass


def odd_model() -> nn.Module:
    return nn.ModuleDict(
        {
            "plain": nn.Linear(2, 2),
            "subclass": _Subclass(2, 2),
            "attention": nn.MultiheadAttention(4, 1),  # its out_proj is a subclass that is read past forward
            "grouped": nn.Conv2d(4, 4, 1, groups=2),
            "reflecting": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            "transposed": nn.ConvTranspose2d(4, 4, 1),
            "one_dimensional": nn.Conv1d(4, 4, 1),
            "conv": nn.Conv2d(4, 4, 3),
            "embedding": nn.Embedding(4, 4),
        }
    )


def test_only_plain_linear_layers_and_ungrouped_convolutions_are_targets() -> None:
    layout = read_layout({"unet": odd_model()}, "m", "f", "F32")
    assert [module.path for module in layout.modules] == ["unet.plain", "unet.conv"]
    assert layout.modules[1] == TargetModule("unet", "conv", "conv2d", 4, 4, (3, 3))


def flux() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    inputs = {
        "hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.8]),
        "guidance": torch.tensor([3.0, 4.0]),
        "img_ids": torch.randn(9, 3),
        "txt_ids": torch.zeros(5, 3),
        "return_dict": False,
    }
    return model, inputs


def unet() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([10, 700]),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "return_dict": False,
    }
    return model, inputs


def clip() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=50, hidden_size=24, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    return CLIPTextModel(config), {"input_ids": torch.randint(50, (2, 7)), "return_dict": False}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=50, d_model=24, d_kv=12, d_ff=48, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return T5EncoderModel(config), {"input_ids": torch.randint(50, (2, 7)), "return_dict": False}


@pytest.mark.parametrize("make", [flux, unet, clip, t5])
def test_a_real_model_with_rows_attached_is_the_base_until_rows_are_selected(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    base = model(**inputs)[0]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    layout = read_layout({"m": model}, "base", "family", "F32")
    arena, table = Arena(layout, 6, CPU), RowTable(2, 4, CPU)
    attach({"m": model}, arena, table)
    assert torch.equal(model(**inputs)[0], base)
    arena.rows[1:5].normal_(std=0.05)
    assert torch.equal(model(**inputs)[0], base)
    table.select([tuple((row, 1.0) for row in range(1, 5)), ()])
    y = model(**inputs)[0]
    assert not torch.equal(y[0], base[0])
    assert torch.equal(y[1], base[1])
    table.select([(), ()])
    assert torch.equal(model(**inputs)[0], base)
    after = {name.replace(".base.", "."): weight for name, weight in model.state_dict().items()}
    assert after.keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in after.items())


@pytest.mark.parametrize("make", [flux, unet, clip, t5])
def test_a_real_model_with_selected_rows_equals_the_dense_merge(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    layout = read_layout({"m": model}, "base", "family", "F32")
    arena, table = Arena(layout, 6, CPU), RowTable(2, 4, CPU)
    arena.rows[1:5].normal_(std=0.02)
    dense, _ = make()
    dense.load_state_dict(model.state_dict())
    dense.eval().double()
    for index, module in enumerate(layout.modules):
        A, B = (view[1:5].double() for view in arena.views(index))
        layer: Any = dense.get_submodule(module.name)
        layer.weight += 0.5 * (B.T @ A).reshape(layer.weight.shape)
    attach({"m": model}, arena, table)
    table.select([tuple((row, 0.5) for row in range(1, 5))] * 2)
    doubled = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    torch.testing.assert_close(model(**inputs)[0].double(), dense(**doubled)[0].double(), rtol=1e-3, atol=2e-4)


def test_every_linear_layer_and_convolution_of_a_unet_is_in_the_layout_in_the_models_order() -> None:
    model, _ = unet()
    layout = read_layout({"unet": model}, "base", "family", "F32")
    expected = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert [module.name for module in layout.modules] == expected
    assert {"conv_in", "down_blocks.0.resnets.0.conv1"} <= set(expected)


def test_rows_are_not_attached_twice() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    arena = Arena(read_layout({"m": model}, "base", "family", "F32"), 4, CPU)
    table = RowTable(1, 2, CPU)
    attach({"m": model}, arena, table)
    with pytest.raises(ValueError, match="already"):
        attach({"m": model}, arena, table)
