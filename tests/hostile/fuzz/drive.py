"""One mutated file through the whole store; many of them, counted by what became of them."""

import random
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loraplex.errors import AdapterRejected
from tests.adapter_store.samples import PackedSample, pack_file
from tests.hostile.fuzz.mutations import mutate
from tests.hostile.fuzz.oracle import Dense, Wrong, dense
from tests.hostile.fuzz.seeds import Seed, choose, seeds

MAX_CPU_SECONDS = 1.0
MAX_GROWTH_BYTES = 200 << 20
PACKED = "packed"
# The last bit of a rounded number, and the smallest number, by dtype.
_EPSILON = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
_TINY = {"F32": 1.5e-45, "F16": 6e-8, "BF16": 9.3e-41}


@dataclass
class Tally:
    """What became of many files."""

    outcomes: Counter[str] = field(default_factory=Counter)
    by_mutation: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_cpu_s: float = 0.0
    seconds: float = 0.0
    growth_bytes: int = 0

    @property
    def cases(self) -> int:
        """How many."""
        return sum(self.outcomes.values())


def run(cases: int, seed: int, folder: Path, first: int = 0) -> Tally:
    """Cases `first` to `first + cases`, each a function of `seed` and its number alone."""
    good, tally, path = seeds(), Tally(), folder / "case.safetensors"
    for one in good:
        if (outcome := attempt(one, one.content, path)) != PACKED:
            tally.failures.append(f"{one.name!r} as it is: {outcome}")
    before_bytes, began_s = _peak_bytes(), time.perf_counter()
    for number in range(first, first + cases):
        chance = random.Random(f"{seed} {number}")
        start = choose(chance, good)
        content, mutation = mutate(chance, start, good)
        began_cpu_s = time.thread_time()
        outcome = attempt(start, content, path)
        tally.slowest_cpu_s = max(tally.slowest_cpu_s, time.thread_time() - began_cpu_s)
        kind, _, what = outcome.partition(": ")
        tally.outcomes[kind] += 1
        tally.by_mutation[mutation, "packed" if kind == PACKED else "refused"] += 1
        if what:
            tally.failures.append(f"case {number} of seed {seed}, {start.name!r}, {mutation}: {outcome[:300]}")
    tally.seconds = time.perf_counter() - began_s
    tally.growth_bytes = _peak_bytes() - before_bytes
    return tally


def attempt(start: Seed, content: bytes, path: Path) -> str:
    """PACKED, the cause of the refusal, or after a colon what is wrong with the store."""
    path.write_bytes(content)
    try:
        packed = pack_file(path, start.layout)
    except AdapterRejected as error:
        text = f"{error.message}{error.key}"
        return error.cause if text.isprintable() and len(text) < 1000 else f"message: {text!r}"
    except Exception as error:  # noqa: BLE001  whatever else leaves the store is what is looked for
        return f"crash: {error!r}"
    return judge(packed, content)


def judge(packed: PackedSample, content: bytes) -> str:
    """PACKED, or after a colon how the rows differ from what the file means."""
    try:
        return _disagreement(packed, dense(content, packed.packing.layout)) or PACKED
    except Wrong as error:
        return f"accepted: {error}"


def _disagreement(packed: PackedSample, expected: dict[str, Dense]) -> str:
    got = unpacked(packed)
    for name in got.keys() - expected.keys():
        if got[name].any():
            return f"invented: {name}"
    for name, one in expected.items():
        tolerance = _tolerance(one, packed.packing.layout.dtype)
        difference = got[name] - one.delta if name in got else one.delta
        if not difference.abs().max() <= tolerance:
            return f"numbers: {name} is off by {difference.abs().max():g}, allowed are {tolerance:g}"
    return ""


def _tolerance(one: Dense, dtype: str) -> float:
    """Each factor is rounded once, and once more where it is a product; a small one to a multiple of the smallest."""
    relative = (3 * _EPSILON[dtype] + 4 * _EPSILON["F32"]) * float(one.magnitude.max())
    spread = _EPSILON[dtype] * float(one.delta.norm())  # where a rank had to be reduced
    smallest = 4 * one.rank * (_TINY[dtype] * (1 + one.largest) + _TINY["F32"] * (1 + one.largest) ** 3)
    return relative + spread + smallest


def unpacked(packed: PackedSample) -> dict[str, torch.Tensor]:
    """Module path -> B @ A in fp64, by the layout of rank rows alone."""
    stored = torch.from_numpy(packed.rows.copy())
    rows = (stored.view(torch.bfloat16) if packed.packing.layout.dtype == "BF16" else stored).double()
    deltas, column = {}, 0
    for index in packed.module_indexes:
        module = packed.packing.layout.modules[index]
        width = module.in_features * module.kernel[0] * module.kernel[1]
        A, B = rows[:, column : column + width], rows[:, column + width : column + width + module.out_features]
        deltas[module.path] = B.T @ A
        column += width + module.out_features
    return deltas


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
