"""How much memory a large file takes: the rows, and little else."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MODULES, WIDTH, RANK = 100, 3072, 128

PROGRAM = """
import sys, time
from pathlib import Path
from adapter_store.fitting import fit_file
from loraplex.pack_options import EXACTLY
from adapter_store.pack import Origin, write
from adapter_store.validate import open_file
from loraplex.layout import Layout, TargetModule

def peak_bytes():  # not of resource: that one starts at what the parent had
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

modules = tuple(TargetModule("transformer", f"m.{i}", "linear", 3072, 3072) for i in range(int(sys.argv[2])))
before, began_s = peak_bytes(), time.perf_counter()
with open_file(Path(sys.argv[1]), 1 << 40) as file:
    packed = fit_file(file, None, Layout("large", "Other", "BF16", modules), EXACTLY, 128).packed
write(packed, Origin("0" * 64), Path(sys.argv[1]).with_name("packed"))
print(peak_bytes() - before, time.perf_counter() - began_s)
"""


def write_large(path: Path) -> int:
    """A BF16 file of `MODULES` square modules of rank 128, written piece by piece. Returns its size in bytes."""
    header, end = {}, 0
    for index in range(MODULES):
        for part, shape in (("A", [RANK, WIDTH]), ("B", [WIDTH, RANK])):
            size_bytes = 2 * RANK * WIDTH
            offsets = [end, end := end + size_bytes]
            header[f"transformer.m.{index}.lora_{part}.weight"] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": offsets,
            }
    text = json.dumps(header).encode()
    numbers = np.random.default_rng(0).standard_normal(RANK * WIDTH, dtype=np.float32)
    data = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _ in header:
            stream.write(data)
    return 8 + len(text) + end


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux")
def test_a_large_file_is_packed_in_less_than_one_and_a_half_times_its_size(tmp_path: Path):
    size_bytes = write_large(tmp_path / "large.safetensors")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "large.safetensors"), str(MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    peak_bytes, seconds = (float(number) for number in done.stdout.split())
    print(f"{size_bytes / 1e6:.0f} MB: {seconds:.1f} s, {peak_bytes / size_bytes:.2f} times the file")  # noqa: T201
    assert 0.5 * size_bytes < peak_bytes < 1.5 * size_bytes
