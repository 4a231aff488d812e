"""Options of the base model: each works beside the rank rows, or says at start what it lacks."""

import importlib.util
import sys

import pytest
import torch
from torch import nn

from executor.arena import Arena, RowTable
from executor.config import ExecutorSettings
from executor.errors import UnsupportedOption
from executor.lora import attach
from executor.recipe import apply_recipe
from executor.service import load_model
from loraplex.targets import read_layout

from .samples import Watched, choices, fetched, packed

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
CPU = torch.device("cpu")


class Tiny(nn.Module):
    """Two layers that can be quantised and one that is too small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow, self.small = nn.Linear(64, 128), nn.Linear(128, 32), nn.Linear(32, 3)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.narrow(torch.relu(self.wide(x))))


class Pipeline:
    """As much of a pipeline as a recipe looks at."""

    def __init__(self, **components: object) -> None:
        self.components = components
        self.vae = components.get("vae")


def changed(settings: ExecutorSettings, **fields: object) -> ExecutorSettings:
    return settings.model_copy(update=fields)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("quantization", "fp8", "CUDA GPU of capability 8.9"),
        ("attention_backend", "flash", "flash-attn"),
        ("attention_backend", "_flash_3", "Flash Attention 3"),
        ("attention_backend", "sage", "sageattention"),
        ("attention_backend", "nonsense", "must be one of"),
    ],
)
def test_an_option_that_cannot_be_had_fails_at_start_by_name_and_reason(
    settings: ExecutorSettings, option: str, value: str, says: str
) -> None:
    with pytest.raises(UnsupportedOption, match=f"{option}: .*{says}"):
        load_model(changed(settings, **{option: value}))


def test_quantisation_without_torchao_says_what_to_install(
    settings: ExecutorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UnsupportedOption, match=r"loraplex\[quantization\]"):
        apply_recipe(Pipeline(), [Tiny()], changed(settings, quantization="int8_weights"), CPU)


def test_a_vae_that_cannot_be_tiled_is_refused(settings: ExecutorSettings) -> None:
    with pytest.raises(UnsupportedOption, match="vae_tiling: Tiny"):
        apply_recipe(Pipeline(vae=Tiny()), [Tiny()], changed(settings, vae_tiling=True), CPU)


@pytest.mark.parametrize(
    "fields", [{"attention_backend": "native"}, {"attention_backend": "_native_math"}, {"vae_tiling": True}]
)
def test_an_option_that_changes_no_numbers_draws_the_same(
    settings: ExecutorSettings, fields: dict[str, object]
) -> None:
    images = []
    for one in (settings, changed(settings, **fields)):
        model = load_model(one)
        watched = Watched()
        model.engine.submit(watched.job, ())
        watched.end()
        images.append(watched.images[0].data)
        model.engine.close()
    assert images[0] == images[1]


@needs_torchao
@pytest.mark.parametrize("name", ["int8", "int8_weights", "fp8_weights"])
def test_rank_rows_beside_quantised_layers_add_exactly_their_own_part(settings: ExecutorSettings, name: str) -> None:
    plain, x = Tiny(), torch.randn(2, 5, 64)
    quantised = Tiny()
    apply_recipe(Pipeline(), [quantised], changed(settings, quantization=name), CPU)
    bare = quantised(x)
    assert 0 < ((bare - plain(x)).norm() / plain(x).norm()) < 0.06
    layout = read_layout({"transformer": quantised}, "tiny", "FluxPipeline", "F32")
    assert layout == read_layout({"transformer": plain}, "tiny", "FluxPipeline", "F32")
    arena, table = Arena(layout, 17, CPU), RowTable(2, 8, CPU)
    attach({"transformer": quantised}, arena, table)
    assert torch.equal(quantised(x), bare)
    adapter = packed(layout, 4, (2,), scale=0.1)  # the last layer, so that what it adds can be computed apart
    arena.load(range(1, 5), adapter.rows, adapter.header.module_indexes)
    table.select([tuple((row, 0.5) for row in range(1, 5)), ()])
    hidden = quantised.narrow(torch.relu(quantised.wide(x)))
    A, B = adapter.rows[:, :32], adapter.rows[:, 32:]
    expected = bare.clone()
    expected[0] += 0.5 * (hidden[0] @ A.T) @ B
    assert torch.allclose(quantised(x), expected, atol=1e-6)


@needs_torchao
def test_a_quantised_executor_draws_with_adapters(settings: ExecutorSettings) -> None:
    model = load_model(changed(settings, quantization="int8_weights", text_encoder_quantization="int8_weights"))
    drawn = []
    for adapters in ((), fetched(packed(model.layout, 4, seed=3, scale=0.05))):
        watched = Watched(adapters=choices(*[1.0] * len(adapters)))
        model.engine.submit(watched.job, adapters)
        watched.end()
        drawn.append(watched.images[0].data)
    model.engine.close()
    assert drawn[0] != drawn[1]
