"""What is found out of a denoiser, and the pipelines that are refused with what is missing."""

from typing import Any

import pytest
import torch
from torch import nn

from executor.arena import Arena, RowTable
from executor.errors import UnsupportedModel
from executor.lora import attach
from executor.pipeline import BasePipeline
from executor.probe import Findings, probe
from loraplex.targets import read_layout

from .plain_pipeline import (
    WIDTH,
    Denoiser,
    FoldsTokens,
    MixesSamples,
    NeedsOneTime,
    PlainPipeline,
    PromptShapes,
    TurnsTokens,
    plain,
)


def found(denoiser: nn.Module, kind: type[PlainPipeline] = PlainPipeline) -> Findings:
    return probe(BasePipeline(plain(denoiser, kind), max_sequence_length=8), 32, 32)


def test_a_pipeline_of_no_known_name_is_served_when_its_samples_are_separate() -> None:
    findings = found(Denoiser())
    assert findings.batching["transformer"].batched == {"hidden_states"}
    assert findings.batching["transformer"].spread == {"timestep"}
    assert findings.excluded == findings.folded == findings.modes == frozenset()


def test_a_single_number_that_the_model_takes_once_only_is_shared_by_value() -> None:
    findings = found(NeedsOneTime())
    assert findings.batching["transformer"].spread == frozenset()
    leaves = {"hidden_states": torch.ones(2, 3, WIDTH), "timestep": torch.tensor(7)}
    assert findings.batching["transformer"].key(leaves) != findings.batching["transformer"].key(
        {**leaves, "timestep": torch.tensor(8)}
    )


@pytest.mark.parametrize(
    ("denoiser", "kind", "says"),
    [
        (MixesSamples(), PlainPipeline, "hidden_states changes what transformer makes of the other samples"),
        (Denoiser(), PromptShapes, "hidden_states of transformer changes shape with the prompt"),
    ],
)
def test_a_model_whose_jobs_cannot_share_graphs_is_refused_by_the_argument(
    denoiser: nn.Module, kind: type[PlainPipeline], says: str
) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        found(denoiser, kind)


def test_layers_that_see_samples_times_tokens_are_folded_and_those_that_mix_them_excluded() -> None:
    assert found(FoldsTokens()).folded == {"transformer.proj"}
    turned = found(TurnsTokens())
    assert turned.excluded == {"transformer.proj"}
    assert turned.folded == frozenset()


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_folded_layer_uses_the_rows_of_each_sample(kind: str) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(4, 6) if kind == "linear" else nn.Conv2d(4, 6, 3, padding=1, stride=2)
    x = torch.randn(2, 5, 3, 4) if kind == "linear" else torch.randn(2, 5, 4, 8, 8)  # samples, frames, ...
    outputs = []
    for folded in (True, False):
        model = nn.Sequential(layer)
        layout = read_layout({"m": model}, "base", "family", "F32")
        arena, table = Arena(layout, 6, torch.device("cpu")), RowTable(2, 2, torch.device("cpu"))
        arena.rows[1:] = torch.randn(5, layout.width, generator=torch.Generator().manual_seed(1))
        attach({"m": model}, arena, table, {"m.0"} if folded else ())
        rows = [((1, 1.0), (2, 0.5)), ((3, -1.0),)]
        if folded:
            table.select(rows)
            outputs.append(model(x.flatten(0, 1)).unflatten(0, (2, 5)))
        else:
            frames = []
            for frame in range(5):
                table.select(rows)
                frames.append(model(x[:, frame]))
            outputs.append(torch.stack(frames, dim=1))
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        ({"transformer": None}, "a component transformer or unet"),
        ({"vae": None}, "a component vae"),
    ],
)
def test_a_pipeline_without_a_component_is_refused_with_what_it_lacks(lacking: dict[str, None], says: str) -> None:
    pipeline = plain(Denoiser())
    pipeline.components.update(lacking)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match=f"PlainPipeline is not served: it lacks {says}"):
        BasePipeline(pipeline, max_sequence_length=8)


def test_a_pipeline_whose_call_is_another_is_refused_with_what_it_lacks() -> None:
    class Upscaler(PlainPipeline):
        def __call__(self, image: Any, prompt: str) -> Any:  # type: ignore[override]
            return image

    with pytest.raises(UnsupportedModel) as refused:
        BasePipeline(plain(Denoiser(), Upscaler), max_sequence_length=8)
    assert "the parameter generator" in str(refused.value)
    assert "a parameter num_images_per_prompt or num_videos_per_prompt" in str(refused.value)
