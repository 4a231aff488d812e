"""One trace of requests, a different adapter in almost every one: loraplex against what diffusers offers.

The baselines are one diffusers pipeline in this process, asked by the same clients one after the other:
`load and unload` (eager, `load_lora_weights` and `unload_lora_weights` around every request), `hotswap` (compiled,
`load_lora_weights(hotswap=True)`), and `no adapters` (compiled, the bare base model, whatever a request asks for).
"""

import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from benchmarks.adapter_files import write_adapter
from benchmarks.machine import compiler_cache, finish
from benchmarks.models import layout_of, tiny_flux
from benchmarks.processes import both_services
from benchmarks.tables import Column, Report
from loraplex import Client

_CLIENTS = 4
_RANKS = (4, 8, 16)
_ROWS_PER_SAMPLE = 16
_PROMPT = "a cat on a blue background"
_MID_SIZE = {"attention_head_dim": 128, "num_attention_heads": 8, "axes_dims_rope": (32, 48, 48)}
_MID_SIZE |= {"num_layers": 1, "num_single_layers": 2}

_COLUMNS = (
    Column("model"),
    Column("served by"),
    Column("images per minute", ".1f"),
    Column("loraplex's ratio", ".2f"),
    Column("p50 s", ".2f"),
    Column("p99 s", ".2f"),
    Column("CPU s per image", ".2f"),
    Column("ratio by CPU", ".2f"),
)

Generate = Callable[[str, int], object]


@dataclass(frozen=True)
class Case:
    """A base model with the trace that it is asked for."""

    name: str
    pipeline: Any
    side: int  # pixels
    steps: int
    requests: int
    adapters: int


def run(device: torch.device) -> list[Report]:
    """The table of both models."""
    report = Report("throughput", f"The same requests from {_CLIENTS} clients, a random adapter in each", _COLUMNS)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for make in (_tiny, _mid_size):
        case = make(device, dtype)
        with compiler_cache(), tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
            report.rows += _of_case(case, Path(scratch), device, dtype)
        report.notes.append(
            f"{case.name}: {case.requests} requests over {case.adapters} adapters (Zipf, ranks "
            f"{', '.join(map(str, _RANKS))}), {case.side} x {case.side} px, {case.steps} steps"
        )
    report.notes.append("closed loop: every client asks again when it has its image; one thread computes")
    report.notes.append(
        "CPU: of the process that computes, all its threads; on a machine that does other things the fairer number"
    )
    return [report]


def _tiny(device: torch.device, dtype: torch.dtype) -> Case:
    return Case("tiny-flux", tiny_flux(device, dtype), side=64, steps=12, requests=48, adapters=24)


def _mid_size(device: torch.device, dtype: torch.dtype) -> Case:
    pipeline = tiny_flux(device, dtype)
    torch.manual_seed(0)
    transformer: Any = FluxTransformer2DModel.from_config({**pipeline.transformer.config, **_MID_SIZE})
    pipeline.transformer = transformer.to(device, dtype).eval().requires_grad_(False)
    return Case("Flux, width 1024, random", pipeline, side=128, steps=4, requests=24, adapters=12)


def _of_case(case: Case, scratch: Path, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[object, ...]]:
    folder = scratch / "adapters"
    folder.mkdir()
    layout = layout_of(case.pipeline, case.name, "F32" if dtype == torch.float32 else "BF16")
    for number in range(case.adapters):
        write_adapter(folder / f"{number}.safetensors", layout, _RANKS[number % 3], torch.bfloat16, seed=number)
    trace = _trace(case)
    case.pipeline.save_pretrained(scratch / "base")
    with _loraplex(case, scratch, device) as (generate, pid):
        ours = _measure(generate, trace, pid)
    baselines = {
        "diffusers, load and unload": _load_and_unload(case, folder),
        "diffusers, hotswap": _hot_swap(case, folder),
        "the bare base, no adapters": _bare(case),
    }
    yield (case.name, "loraplex", ours.per_minute, 1.0, ours.p50, ours.p99, ours.cpu_s, 1.0)
    for name, prepare in baselines.items():
        generate = _in_turn(prepare(), device)
        one = _measure(generate, trace, os.getpid())
        ratios = ours.per_minute / one.per_minute, one.cpu_s / ours.cpu_s
        yield (case.name, name, one.per_minute, ratios[0], one.p50, one.p99, one.cpu_s, ratios[1])


def _trace(case: Case) -> list[tuple[str, int]]:
    """(adapter, seed) of every request: adapter k is asked for in proportion to 1 / (k + 1)."""
    chance = random.Random(0)
    weights = [1 / (k + 1) for k in range(case.adapters)]
    chosen = chance.choices(range(case.adapters), weights, k=case.requests)
    return [(str(adapter), seed) for seed, adapter in enumerate(chosen)]


@dataclass(frozen=True)
class Measured:
    """What the clients saw."""

    per_minute: float
    p50: float
    p99: float
    cpu_s: float  # per image


def _measure(generate: Generate, trace: Sequence[tuple[str, int]], pid: int) -> Measured:
    """The trace, asked by all clients; `pid` is the process that computes."""
    for adapter, seed in trace[:2]:  # warm
        generate(adapter, seed)
    seconds: list[float] = []

    def ask(request: tuple[str, int]) -> None:
        began = time.perf_counter()
        generate(*request)
        seconds.append(time.perf_counter() - began)

    began, cpu_before = time.perf_counter(), _cpu_seconds(pid)
    with ThreadPoolExecutor(_CLIENTS) as clients:
        list(clients.map(ask, trace))
    total = time.perf_counter() - began
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    cpu_s = (_cpu_seconds(pid) - cpu_before) / len(trace)
    return Measured(60 * len(trace) / total, statistics.median(seconds), p99, cpu_s)


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, in user and kernel, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _loraplex(case: Case, scratch: Path, device: torch.device) -> Iterator[tuple[Generate, int]]:
    flags = {
        "resolutions": f"{case.side}x{case.side}",
        "max-sequence-length": 12,
        "rows-per-sample": _ROWS_PER_SAMPLE,
        "threads": 1,
        "device": device,
    }
    options = tuple(f"--{name}={value}" for name, value in flags.items())
    with (
        both_services(scratch / "adapters", scratch / "cache", scratch / "base", options) as (running, *_),
        Client(executor=running.executor, store=running.store, timeout_s=600.0) as client,
    ):

        def generate(adapter: str, seed: int) -> object:
            result = client.generate_image(
                _PROMPT, adapters={adapter: 1.0}, seed=seed, num_inference_steps=case.steps, output_format="png"
            )
            assert result.summary.recompilations == 0
            return result

        yield generate, running.processes[1].pid


def _in_turn(generate: Generate, device: torch.device) -> Generate:
    """A pipeline can do one thing at a time."""
    lock = threading.Lock()

    def locked(adapter: str, seed: int) -> object:
        with lock, torch.no_grad():
            image = generate(adapter, seed)
            finish(device)
            return image

    return locked


def _call(case: Case, seed: int) -> object:
    return case.pipeline(
        _PROMPT,
        width=case.side,
        height=case.side,
        num_inference_steps=case.steps,
        max_sequence_length=12,
        generator=torch.Generator().manual_seed(seed),
    ).images[0]


def _load_and_unload(case: Case, folder: Path) -> Callable[[], Generate]:
    def generate(adapter: str, seed: int) -> object:
        case.pipeline.load_lora_weights(folder / f"{adapter}.safetensors")
        image = _call(case, seed)
        case.pipeline.unload_lora_weights()
        return image

    return lambda: generate


def _hot_swap(case: Case, folder: Path) -> Callable[[], Generate]:
    def generate(adapter: str, seed: int) -> object:
        case.pipeline.load_lora_weights(folder / f"{adapter}.safetensors", adapter_name="slot", hotswap=True)
        return _call(case, seed)

    def prepare() -> Generate:
        case.pipeline.enable_lora_hotswap(target_rank=max(_RANKS))
        case.pipeline.load_lora_weights(folder / "0.safetensors", adapter_name="slot")
        case.pipeline.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        return generate

    return prepare


def _bare(case: Case) -> Callable[[], Generate]:
    def prepare() -> Generate:
        case.pipeline.unload_lora_weights()
        case.pipeline.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        return lambda _, seed: _call(case, seed)

    return prepare
