"""One family after the other: its tiny random pipeline, compiled and warm."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.config import ExecutorSettings
from executor.runs import current_run
from executor.service import LoadedModel, load_model

from .tiny import FAMILIES, save

EAGER = ("schnell", "wan22", "wan22_ti2v")  # their blocks are those of flux and wan


@dataclass
class Tiny:
    """A loaded family, and what its jobs' denoiser calls gave, by request."""

    name: str
    folder: Path
    settings: ExecutorSettings
    model: LoadedModel
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pipelines are saved."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, folder: Path) -> Iterator[Tiny]:
    """The family, with room for two adapters of rank 4 at a time."""
    name = request.param
    settings = ExecutorSettings(
        base_model=str(save(name, folder)),
        resolutions="32x32",  # type: ignore[arg-type]
        max_sequence_length=64 if name == "qwen_image" else 16,
        default_num_frames=5,
        compile="off" if name in EAGER else os.environ.get("TINY_COMPILE", "regional"),  # type: ignore[arg-type]
        compile_cache_dir=None,
        threads=1,
        arena_rows=9,
        rows_per_sample=8,
        batch_wait_ms=50,
    )
    torch.compiler.set_stance("default")  # whatever was loaded before forbids compilation
    model = load_model(settings)
    loaded = Tiny(name, Path(settings.base_model), settings, model)
    for denoiser in model.base.denoisers.values():
        _record(denoiser, loaded)
    yield loaded
    model.engine.close()


def _record(denoiser: Any, loaded: Tiny) -> None:
    handed_off = denoiser.forward

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = handed_off(*args, **kwargs)
        loaded.outputs[current_run.get().job.request_id].append(output[0])
        return output

    denoiser.forward = recorded
