"""Headers and metadata made to cost memory or time: each is refused, or read, within a bound on both."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store.header import MAX_HEADER_BYTES, MAX_TENSORS

PROGRAM = """
import sys, time
from pathlib import Path
from adapter_store.fitting import fit_file
from loraplex.pack_options import EXACTLY
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule

def peak_bytes():  # not of resource: that one starts at what the parent had
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

modules = tuple(TargetModule("transformer", f"m.{i}", "linear", 1, 1) for i in range(1000))
before, began_s = peak_bytes(), time.process_time()
try:
    with open_file(Path(sys.argv[1]), 1 << 30) as file:
        fit_file(file, None, Layout("tiny", "Other", "F32", modules), EXACTLY, 128)
    cause = "packed"
except AdapterRejected as error:
    assert len(error.message) < 500, len(error.message)
    cause = error.cause
print(cause, peak_bytes() - before, time.process_time() - began_s)
"""
MAX_PEAK_BYTES = 300e6
MAX_SECONDS = 10.0  # of CPU; most take less than one


def filled(piece: bytes, head: bytes = b'{"a":[', tail: bytes = b"0]}", room: int = MAX_HEADER_BYTES) -> bytes:
    """`piece` as often as a header of the largest size has room for it."""
    return head + piece * ((room - len(head) - len(tail)) // len(piece)) + tail


def entries(count: int, end: str, **changes: object) -> dict[str, object]:
    """Well-formed tensors of one number."""
    return {
        f"{index}{end}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * index, 4 * index + 4]} | changes
        for index in range(count)
    }


def pairs(count: int) -> dict[str, object]:
    """Pairs of rank 1 for a thousand modules that exist, and for others."""
    names = [f"transformer.m.{index}.lora_{part}.weight" for index in range(count // 2) for part in "AB"]
    return {
        name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * index, 4 * index + 4]}
        for index, name in enumerate(names)
    }


def noted(text: str, tensors: int = 2000) -> bytes:
    return json.dumps({"__metadata__": {"lora_adapter_metadata": text}} | pairs(tensors)).encode()


BOMBS: dict[str, tuple[Callable[[], bytes], set[str]]] = {
    "empty lists": (lambda: filled(b"[],"), {"HEADER_INVALID"}),
    "empty tables": (lambda: filled(b"{},"), {"HEADER_INVALID"}),
    "tables of one": (lambda: filled(b'{"":0},'), {"HEADER_INVALID"}),
    "numbers": (lambda: filled(b"0,"), {"HEADER_INVALID"}),
    "large numbers": (lambda: filled(b"123456789012345,"), {"HEADER_INVALID"}),
    "empty texts": (lambda: filled(b'"",'), {"HEADER_INVALID"}),
    "texts of one": (lambda: filled('"漢",'.encode()), {"HEADER_INVALID"}),
    "quotes": (lambda: filled(b'"', b"{", b""), {"HEADER_INVALID"}),
    "a text without end": (lambda: filled(b'\\"', b'{"', b""), {"HEADER_INVALID"}),
    "a text of backslashes": (lambda: filled(b"\\\\", b'{"', b'":0}'), {"HEADER_INVALID"}),
    "one name of escapes": (lambda: filled(b"\\u001b", b'{"', b'":0}'), {"HEADER_INVALID"}),
    "nested lists": (lambda: filled(b"[", b'{"a":', b""), {"HEADER_INVALID"}),
    "nested tables": (lambda: filled(b'{"a":', b"", b""), {"HEADER_INVALID"}),
    "lists nested as deep as is let through": (lambda: b'{"a":' + b"[" * (3 * MAX_TENSORS - 10), {"HEADER_INVALID"}),
    "a long number": (lambda: filled(b"9", b'{"a":', b"}"), {"HEADER_INVALID"}),
    "a long exponent": (lambda: filled(b"9", b'{"a":1e', b"}"), {"HEADER_INVALID"}),
    "spaces": (lambda: filled(b" ", b"{", b"}"), {"NO_TENSORS"}),
    "no UTF-8": (lambda: filled(b"\xff", b'{"', b'":0}'), {"HEADER_INVALID"}),
    "wide characters": (lambda: filled("\U0001f600".encode(), b'{"__metadata__":{"a":"', b'"}}'), {"NO_TENSORS"}),
    "long names": (
        lambda: filled(b'x":0,"' + b"x" * 1_000_000, b'{"', b'":0}'),
        {"HEADER_INVALID", "DUPLICATE_KEY"},
    ),
    "100,000 tensors": (lambda: json.dumps(entries(100_000, ".alpha")).encode(), {"HEADER_INVALID"}),
    "as many tensors as may be": (lambda: json.dumps(pairs(MAX_TENSORS)).encode(), {"UNKNOWN_MODULE"}),
    "as many alphas as may be": (lambda: json.dumps(entries(MAX_TENSORS, ".alpha")).encode(), {"INCOMPLETE_PAIR"}),
    "names that take regular expressions long": (
        lambda: json.dumps(entries(MAX_TENSORS, "norm" * 50 + ".lora_A.weight")).encode(),
        {"INCOMPLETE_PAIR", "SHAPE_MISMATCH"},
    ),
    "names that end as no algorithm": (
        lambda: json.dumps(entries(MAX_TENSORS, "norm" * 50 + ".alpha")).encode(),
        {"INCOMPLETE_PAIR"},
    ),
    "metadata as large as they may be": (
        lambda: json.dumps({"__metadata__": {"a": "\\" * (6 << 20)}} | pairs(2)).encode(),
        {"packed"},
    ),
    "10,000 metadata": (
        lambda: json.dumps({"__metadata__": {str(n): "" for n in range(9_000)}} | pairs(2)).encode(),
        {"packed"},
    ),
    "lists in the adapter's metadata": (lambda: noted("[" + "[]," * (4 << 20) + "0]"), {"METADATA_INVALID"}),
    "depth in the adapter's metadata": (lambda: noted('{"a":' * (1 << 20)), {"METADATA_INVALID"}),
    "patterns in the adapter's metadata": (
        lambda: noted(json.dumps({"transformer.rank_pattern": {f"n{n}": 1 for n in range(500_000)}})),
        {"METADATA_INVALID"},
    ),
    "as many patterns as may be": (
        lambda: noted(json.dumps({"transformer.rank_pattern": {f"n{n}": 1 for n in range(4000)}})),
        {"METADATA_INVALID"},
    ),
    "components in the adapter's metadata": (
        lambda: noted(json.dumps({f"{n}.r": 1 for n in range(50_000)})),
        {"METADATA_INVALID", "packed"},
    ),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_defused_within_its_memory_and_time(tmp_path: Path, name: str):
    build, causes = BOMBS[name]
    text = build()
    assert len(text) <= MAX_HEADER_BYTES
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    if b"data_offsets" in text:
        with path.open("ab") as stream:
            stream.truncate(8 + len(text) + 4 * text.count(b"data_offsets"))
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr[-2000:]
    cause, peak_bytes, seconds = done.stdout.split()
    print(f"{len(text) / 1e6:.1f} MB, {name}: {cause}, {float(peak_bytes) / 1e6:.0f} MB, {float(seconds):.2f} s")  # noqa: T201
    assert cause in causes
    assert float(peak_bytes) < MAX_PEAK_BYTES
    assert float(seconds) < MAX_SECONDS
