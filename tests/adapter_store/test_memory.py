"""How much memory a large file takes: that of a few modules, whatever its size."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from adapter_store.dtypes import SIZES, encode

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
    packing = fit_file(file, None, Layout("large", "Other", sys.argv[3], modules), EXACTLY, 128).packing
    write(file, packing, Origin("0" * 64), Path(sys.argv[1]).with_name("packed"))
print(peak_bytes() - before, time.perf_counter() - began_s)
"""


def write_large(path: Path, dtype: str) -> int:
    """A file of `MODULES` square modules of rank 128, written piece by piece. Returns its size in bytes."""
    header, end = {}, 0
    for index in range(MODULES):
        for part, shape in (("A", [RANK, WIDTH]), ("B", [WIDTH, RANK])):
            offsets = [end, end := end + SIZES[dtype] * RANK * WIDTH]
            header[f"transformer.m.{index}.lora_{part}.weight"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": offsets,
            }
    text = json.dumps(header).encode()
    numbers = np.random.default_rng(0).standard_normal(RANK * WIDTH, dtype=np.float32)
    data = encode(numbers, "BF16").tobytes() if dtype == "BF16" else bytes(RANK * WIDTH // 4) + bytes(range(120)) * 4
    data = data.ljust(SIZES[dtype] * RANK * WIDTH, b"\x08")
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _ in header:
            stream.write(data)
    return 8 + len(text) + end


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux")
@pytest.mark.parametrize(("dtype", "rows_dtype"), [("BF16", "BF16"), ("BF16", "F32"), ("F8_E4M3", "BF16")])
def test_the_memory_that_packing_takes_does_not_grow_with_the_file(tmp_path: Path, dtype: str, rows_dtype: str):
    size_bytes = write_large(tmp_path / "large.safetensors", dtype)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "large.safetensors"), str(MODULES), rows_dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    peak_bytes, seconds = (float(number) for number in done.stdout.split())
    ratio = peak_bytes / size_bytes
    print(f"{dtype} to {rows_dtype}, {size_bytes / 1e6:.0f} MB: {seconds:.1f} s, {ratio:.2f} times the file")  # noqa: T201
    assert 0 < peak_bytes < 40e6
