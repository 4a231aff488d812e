"""The machine that a benchmark ran on, how torch is set up for measuring, and the stopwatch."""

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

PASSES = 7

_PACKAGES = ("torch", "diffusers", "peft", "grpcio")


def prepare(name: str) -> torch.device:
    """The device of that name. Keeps torch to one thread, and from building graphs for training."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return torch.device(name)


def describe(device: torch.device) -> dict[str, str]:
    """What a reader of the numbers must know."""
    chip = _cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "device": f"{device.type}: {chip}",
        "cores": f"{len(os.sched_getaffinity(0))}, load average {os.getloadavg()[0]:.1f} at the start",
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in _PACKAGES},
    }


def median_seconds(
    passes: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeat: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The median time of one call of each of `passes`.

    They take turns, PASSES + 1 times, and the first turn does not count. Each turn calls `repeat` times.
    """
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(PASSES + 1):
        for name, function in passes.items():
            finish(device)
            began = clock()
            for _ in range(repeat):
                function()
            finish(device)
            seconds[name].append((clock() - began) / repeat)
    return {name: median(times) for name, times in seconds.items()}


def median(times: Sequence[float]) -> float:
    """The median of all but the first."""
    return statistics.median(times[1:])


@contextmanager
def compiler_cache() -> Iterator[None]:
    """An empty cache for torch.compile, here and in processes started inside, so that no other run is in the way."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        variables = {"TORCHINDUCTOR_CACHE_DIR": folder, "LORAPLEX_EXECUTOR_COMPILE_CACHE_DIR": f"{folder}/kept"}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                del os.environ[name]


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"
