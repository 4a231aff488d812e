"""Every denoiser with its rank rows is one graph without a break, whatever the prompts and steps.

Dynamo's part of compilation alone: what it traces does not depend on the code that is generated of it.
"""

from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from executor.arena import Arena, RowTable
from executor.arguments import nested
from executor.config import ExecutorSettings
from executor.lora import attach
from executor.pipeline import load
from executor.probe import _first_calls, probe
from loraplex.targets import read_layout

from .tiny import FAMILIES, save

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
]

LIKE_THE_EXECUTOR = {"automatic_dynamic_shapes": False, "recompile_limit": 256}  # the limit counts all models together
OTHERS_DENOISERS = {"schnell", "wan22", "sd15_safety"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - OTHERS_DENOISERS))
def test_a_denoiser_is_one_graph_for_all_prompts(family: str, folder: Path) -> None:
    torch.compiler.set_stance("default")
    settings = ExecutorSettings(
        base_model=str(save(family, folder)),
        resolutions="32x32",  # type: ignore[arg-type]
        max_sequence_length=64 if family in ("qwen_image", "hunyuan_video") else 16,
        default_num_frames=5,
    )
    device = torch.device("cpu")
    base = load(settings, device, torch.float32)
    found = probe(base, 32, 32)
    base.batching = found.batching
    calls = [_first_calls(base, 32, 32, 1, prompt) for prompt in ("cat", "a red circle on a white background")]
    layout = read_layout(base.adaptable, "base", family, "F32")
    arena, table = Arena(layout, 4, device), RowTable(1, 2, device)
    attach(base.adaptable, arena, table, found.folded)
    arena.rows[1:].normal_(std=0.05)
    for name, forward in base.forwards.items():
        counter = CompileCounter()
        with torch.no_grad(), torch._dynamo.config.patch(LIKE_THE_EXECUTOR):
            compiled = torch.compile(forward, backend=counter, fullgraph=True, dynamic=False)
            for call, rows in zip([*calls, *calls], ((), ((1, 1.0),), ((2, 0.5), (3, 2.0)), ((3, -1.0),)), strict=True):
                batching = found.batching[name]
                leaves = batching.join([batching.cut(batching.spread_out(call[name].leaves), 0, 1)])
                table.select([rows])
                expected = forward(**nested(leaves))[0]
                torch.testing.assert_close(compiled(**nested(leaves))[0], expected, rtol=1e-4, atol=1e-5)
        assert counter.frame_count == 1
