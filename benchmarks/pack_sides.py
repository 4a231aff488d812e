"""One side of the pack benchmark in a process of its own: `python -m benchmarks.pack_sides SIDE MODEL FOLDER PASSES`.

Prints a line of JSON: the seconds of every pass, and by how much its peak of memory grew in the passes. The store's
side imports no torch, as the store.
"""

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ADAPTER, PACKED, LAYOUT = "adapter.safetensors", "packed.safetensors", "layout.binpb"

Side = Callable[[str, Path], Iterator[tuple[Callable[[], object], Callable[[], object]]]]


def store(model: str, folder: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Steps 3 to 6: from the file to rank rows, and the packed file on the disk."""
    from adapter_store.fitting import fit_file
    from adapter_store.pack import Origin, write
    from adapter_store.validate import open_file
    from loraplex.layout import Layout
    from loraplex.pack_options import EXACTLY
    from loraplex.v1 import layout_pb2

    layout = Layout.from_proto(layout_pb2.Layout.FromString((folder / LAYOUT).read_bytes()))

    def pack() -> None:
        with open_file(folder / ADAPTER, 1 << 40) as file:
            packing = fit_file(file, None, layout, EXACTLY, 128).packing
            write(file, packing, Origin("0" * 64), folder / PACKED)

    yield pack, (folder / PACKED).unlink
    pack()  # once more, for the check


def diffusers(model: str, folder: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """`lora_state_dict` and peft's load, on a model that has this topology."""
    import torch

    from benchmarks import models

    torch.set_num_threads(1)
    pipeline: Any = models.MODELS[model](torch.device("cpu"), torch.bfloat16)
    yield lambda: pipeline.load_lora_weights(folder / ADAPTER), pipeline.unload_lora_weights


SIDES: dict[str, Side] = {"store": store, "diffusers": diffusers}


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


def main(side: str, model: str, folder: str, passes: str) -> None:
    """Run one side, once more than `passes`: the first pass does not count for the time."""
    seconds = []
    for run, undo in SIDES[side](model, Path(folder)):
        gc.collect()
        with contextlib.suppress(OSError):  # where that is not allowed the peak is that of the imports at least
            Path("/proc/self/clear_refs").write_text("5")
        before_bytes = _resident_bytes()
        for number in range(int(passes) + 1):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
            if number == 0:
                grown_bytes = _peak_bytes() - before_bytes
            undo()
    sys.stdout.write(json.dumps({"seconds": seconds[1:], "grown_bytes": grown_bytes}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
