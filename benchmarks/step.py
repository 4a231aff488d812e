"""What the arena adds to one denoiser step: the bare model against the attached one, both compiled."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import compiler_cache, median_seconds
from benchmarks.models import FAMILY, flux_blocks, pipeline_of, tiny_flux
from benchmarks.tables import Column, Report
from executor.arena import TORCH_DTYPES, Arena, RowTable
from executor.compilation import compiled_denoisers
from executor.lora import attach
from executor.pipeline import BasePipeline
from loraplex.targets import read_layout

_ROWS_PER_SAMPLE = 64
_ARENA_ROWS = 128
_MIXED_RANKS = (8, 24, 32)
_TEXT_TOKENS, _IMAGE_SIDE = 512, (8, 16)  # 128 image tokens

_COLUMNS = (
    Column("model"),
    Column("dtype"),
    Column("bare ms", ".2f"),
    Column("attached, no adapter ms", ".2f"),
    Column("ratio", ".3f"),
    Column("3 adapters mixed ms", ".2f"),
    Column("ratio mixed", ".3f"),
    Column("FLOPs ratio", ".3f"),
)


def run(device: torch.device) -> list[Report]:
    """The table of steps, both models."""
    dtype = "F32" if device.type == "cpu" else "BF16"
    report = Report("step", f"One denoiser step, batch 1, {_ROWS_PER_SAMPLE} rank rows per sample", _COLUMNS)
    with compiler_cache():
        for make in (_tiny_case, _blocks_case):
            case = make(device, dtype)
            report.rows.append((case.name, dtype, *_measure(case, dtype, device)))
    report.notes += [
        "torch.compile on each block as the executor does it: fullgraph, static shapes; median of 7, interleaved; "
        "on a CPU the CPU time of its one thread",
        f"mixed: ranks {', '.join(map(str, _MIXED_RANKS))} in shuffled rows of {_ARENA_ROWS}",
        "FLOPs ratio: counted in the attached and in the bare model; what the arithmetic alone would add",
    ]
    return [report]


@dataclass(frozen=True)
class Case:
    """A denoiser, the arguments of one call, and how many calls are timed together."""

    name: str
    model: Any
    arguments: Mapping[str, Any]
    repeat: int


def _tiny_case(device: torch.device, dtype: str) -> Case:
    pipeline = tiny_flux(device, TORCH_DTYPES[dtype])
    return Case("tiny-flux, 64 x 64 px", pipeline.transformer, _arguments_of_a_step(pipeline), repeat=20)


def _arguments_of_a_step(pipeline: Any) -> dict[str, Any]:
    """What the pipeline passes to its denoiser."""
    seen: dict[str, Any] = {}
    hook = pipeline.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    pipeline("a cat on a blue background", width=64, height=64, num_inference_steps=1, max_sequence_length=12)
    hook.remove()
    return seen


def _blocks_case(device: torch.device, dtype: str) -> Case:
    model = flux_blocks(device, TORCH_DTYPES[dtype])
    config, tokens = model.config, _IMAGE_SIDE[0] * _IMAGE_SIDE[1]
    make: dict[str, Any] = {"device": device, "dtype": TORCH_DTYPES[dtype]}
    arguments = {
        "hidden_states": torch.randn(1, tokens, config.in_channels, **make),
        "encoder_hidden_states": torch.randn(1, _TEXT_TOKENS, config.joint_attention_dim, **make),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, **make),
        "timestep": torch.full((1,), 0.5, **make),
        "guidance": torch.full((1,), 3.5, **make),
        "img_ids": torch.cartesian_prod(*(torch.arange(n) for n in (1, *_IMAGE_SIDE))).to(**make),
        "txt_ids": torch.zeros(_TEXT_TOKENS, 3, **make),
        "return_dict": False,
    }
    name = f"FLUX.1-dev width, 1 + 1 blocks, {_TEXT_TOKENS} + {tokens} tokens"
    return Case(name, model, arguments, repeat=1)


def _measure(case: Case, dtype: str, device: torch.device) -> tuple[float, ...]:
    bare, attached = case.model, _sharing_copy(case.model)
    table = _attach(attached, dtype, device)
    mixed = _mixed_rows()
    flops = _flops(attached, case) / _flops(bare, case)
    for model in (bare, attached):
        compiled_denoisers(BasePipeline(pipeline_of(model), max_sequence_length=12), "regional")

    outputs: dict[str, torch.Tensor] = {}

    def step(name: str, model: Any, rows: tuple[tuple[int, float], ...] = ()) -> Callable[[], None]:
        def call() -> None:
            table.select([rows])
            outputs[name] = model(**case.arguments)[0]

        return call

    passes = {"bare": step("bare", bare), "zero": step("zero", attached), "mixed": step("mixed", attached, mixed)}
    # A step is the work of one thread; its CPU time leaves out what the machine's other work takes from it.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    seconds = median_seconds(passes, device, case.repeat, clock)
    _check(**outputs)
    bare_ms, zero_ms, mixed_ms = (1e3 * seconds[name] for name in passes)
    return bare_ms, zero_ms, zero_ms / bare_ms, mixed_ms, mixed_ms / bare_ms, flops


def _sharing_copy(model: Any) -> Any:
    """A second model on the same weights."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _attach(model: Any, dtype: str, device: torch.device) -> RowTable:
    components = {"transformer": model}
    arena = Arena(read_layout(components, "step", FAMILY, dtype), _ARENA_ROWS, device)
    arena.rows[1:].normal_(std=0.01)
    table = RowTable(1, _ROWS_PER_SAMPLE, device)
    attach(components, arena, table)
    return table


def _mixed_rows() -> tuple[tuple[int, float], ...]:
    """Three adapters in rows that do not stand together, at three strengths."""
    shuffled = (torch.randperm(_ARENA_ROWS - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    strengths = [strength for rank, strength in zip(_MIXED_RANKS, (1.0, -0.5, 0.7), strict=True) for _ in range(rank)]
    return tuple(zip(shuffled, strengths, strict=False))


def _flops(model: Any, case: Case) -> int:
    with FlopCounterMode(display=False) as counter:
        model(**case.arguments)
    return counter.get_total_flops()


def _check(bare: torch.Tensor, zero: torch.Tensor, mixed: torch.Tensor) -> None:
    """Zero rows leave the base model's output; adapters change it."""
    assert torch.allclose(bare, zero, rtol=1e-3, atol=1e-3), "no adapter, but another output"
    assert not torch.allclose(bare, mixed, rtol=1e-3, atol=1e-3), "three adapters, but the same output"
