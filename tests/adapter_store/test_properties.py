"""Any layout, algorithm, rank, alpha, dtype and order of keys: the packed rows equal the dense formula in fp64."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import pack
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import Float64, Tensors, fit_adapter, unpack, write_adapter

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
Parts = dict[str, Float64]


@dataclass
class Adapter:
    """What a file is written with, and for every module what it must come to."""

    tensors: Tensors = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)
    differences: dict[str, Callable[[Callable[[Float64], Float64]], Float64]] = field(default_factory=dict)


def tucker(core: Float64, left: Float64, right: Float64) -> Float64:
    """[rank, rank, kh, kw] between [rank, out] and [rank, in]."""
    return np.einsum("ijhw,io,jx->oxhw", core, left, right)


def lora(p: Parts) -> Float64:
    if "lora_mid.weight" in p:
        down, up = (p[f"lora_{part}.weight"][:, :, 0, 0] for part in ("down", "up"))
        return tucker(p["lora_mid.weight"], up.T, down)
    down, up = (p[f"lora_{part}.weight"] for part in ("down", "up"))
    return up.reshape(len(up), -1) @ down.reshape(len(down), -1)


def loha(p: Parts) -> Float64:
    sides = [
        tucker(p[f"hada_t{i}"], p[f"hada_w{i}_a"], p[f"hada_w{i}_b"])
        if f"hada_t{i}" in p
        else p[f"hada_w{i}_a"] @ p[f"hada_w{i}_b"]
        for i in "12"
    ]
    return sides[0] * sides[1]


def lokr(p: Parts) -> Float64:
    w1 = p["lokr_w1"] if "lokr_w1" in p else p["lokr_w1_a"] @ p["lokr_w1_b"]
    if "lokr_t2" in p:
        w2 = tucker(p["lokr_t2"], p["lokr_w2_a"], p["lokr_w2_b"])
    elif "lokr_w2" in p:
        w2 = p["lokr_w2"]
    else:
        w2 = p["lokr_w2_a"] @ p["lokr_w2_b"]
    # Row (i, k), column (j, l, kernel), written out.
    flat = w2.reshape(len(w2), w2.shape[1], -1)
    return np.einsum("ij,klx->ikjlx", w1, flat).reshape(len(w1) * len(w2), -1)


def full(p: Parts) -> Float64:
    return p["diff"]


@st.composite
def shapes(draw: st.DrawFn, module: TargetModule) -> tuple[Callable[[Parts], Float64], dict[str, tuple[int, ...]], int]:
    """The formula of an algorithm, the shapes of its parts for `module`, and what alpha is divided by, if anything."""
    out, inputs, kernel = module.out_features, module.in_features, module.kernel
    rank = draw(st.integers(1, 9))
    suffix = kernel if module.kind == "conv2d" else ()
    one = (1, 1) if module.kind == "conv2d" else ()
    use_core = module.kind == "conv2d" and draw(st.booleans())
    algorithm = draw(st.sampled_from(["lora", "loha", "lokr", "full"]))
    if algorithm == "lora":
        found = {
            "lora_down.weight": (rank, inputs, *(one if use_core else suffix)),
            "lora_up.weight": (out, rank, *one),
        }
        return lora, found | ({"lora_mid.weight": (rank, rank, *kernel)} if use_core else {}), rank
    if algorithm == "loha":
        found = {}
        for i in "12":
            found[f"hada_w{i}_a"] = (rank, out) if use_core else (out, rank)
            found[f"hada_w{i}_b"] = (rank, inputs) if use_core else (rank, module.a_width)
            if use_core:
                found[f"hada_t{i}"] = (rank, rank, *kernel)
        return loha, found, rank
    if algorithm == "full":
        return full, {"diff": (out, inputs, *suffix)}, 0
    rows = draw(st.sampled_from([n for n in range(1, out + 1) if out % n == 0]))
    columns = draw(st.sampled_from([n for n in range(1, inputs + 1) if inputs % n == 0]))
    found, decomposed = {}, draw(st.sampled_from(["", "1", "2", "12"]))
    if "1" in decomposed:
        found |= {"lokr_w1_a": (rows, rank), "lokr_w1_b": (rank, columns)}
    else:
        found["lokr_w1"] = (rows, columns)
    rest = (out // rows, inputs // columns)
    if "2" not in decomposed:
        found["lokr_w2"] = (*rest, *suffix)
    elif use_core:
        found |= {"lokr_w2_a": (rank, rest[0]), "lokr_w2_b": (rank, rest[1]), "lokr_t2": (rank, rank, *kernel)}
    else:
        found |= {"lokr_w2_a": (rest[0], rank), "lokr_w2_b": (rank, rest[1] * kernel[0] * kernel[1])}
    return lokr, found, rank if decomposed else 0


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = st.integers(1, 16)
    modules = []
    for index in range(draw(st.integers(1, 4))):
        kernel = draw(st.sampled_from([None, (1, 1), (3, 3), (1, 2)]))
        kind = "linear" if kernel is None else "conv2d"
        modules.append(TargetModule("unet", f"block.{index}", kind, draw(sizes), draw(sizes), kernel or (1, 1)))
    return Layout("tiny", "Other", "F32", tuple(modules))


@st.composite
def adapters(draw: st.DrawFn) -> tuple[Layout, Adapter]:
    layout, adapter = draw(layouts()), Adapter()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    for module in layout.modules:
        formula, found, rank = draw(shapes(module))
        stem, numbers = f"unet.{module.name}", {}
        for part, shape in found.items():
            numbers[part] = torch.randn(shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
        scaling = 1.0
        alpha = draw(st.sampled_from([None, 0.5, 3.0, 16.0]))
        if alpha is not None and formula is not full:
            scaling = alpha / rank if rank else 1.0
            if formula is lora and draw(st.booleans()):
                adapter.metadata |= {
                    "unet.alpha_pattern": adapter.metadata.get("unet.alpha_pattern", {}) | {module.name: alpha}
                }  # type: ignore[operator]
            else:
                adapter.tensors[f"{stem}.alpha"] = torch.tensor(alpha).to(draw(st.sampled_from(DTYPES[:4])))
        adapter.tensors |= {f"{stem}.{part}": tensor for part, tensor in numbers.items()}
        values = {part: tensor.double().numpy() for part, tensor in numbers.items()}
        adapter.differences[module.path] = lambda of, f=formula, v=values, s=scaling: (
            s * f({part: of(one) for part, one in v.items()}).reshape(len(f(v)), -1)
        )
    names = draw(st.permutations(sorted(adapter.tensors)))
    adapter.tensors = {name: adapter.tensors[name] for name in names}
    return layout, adapter


@given(adapters())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_rows_are_the_dense_formula_whatever_the_file_looks_like(case: tuple[Layout, Adapter]):
    """Rows 46, 47, 62, 111 and 112 among them. The error is measured against the size of what is summed."""
    layout, adapter = case
    metadata = {"lora_adapter_metadata": json.dumps(adapter.metadata)} if adapter.metadata else {}
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        for order in (list(adapter.tensors), sorted(adapter.tensors)):
            tensors = {name: adapter.tensors[name] for name in order}
            path = write_in_order(Path(folder) / "a.safetensors", tensors, metadata)
            fitted = fit_adapter(path, layout, max_rank=1 << 12)
            packed = Path(folder) / "packed.safetensors"
            packed.unlink(missing_ok=True)
            digests.add(fitted.packed.write(pack.Origin("0" * 64), packed)[0])
        got = unpack(packed)
    assert len(digests) == 1
    assert not fitted.packed.error
    assert set(got) == set(adapter.differences)
    for path, difference in adapter.differences.items():
        exact, summed = difference(lambda values: values), difference(np.abs)
        assert np.abs(got[path] - exact).max() <= 1e-6 * summed.max()


def write_in_order(path: Path, tensors: Tensors, metadata: dict[str, str]) -> Path:
    """A safetensors file with its keys in the order of `tensors`; the library would sort them."""
    write_adapter(path, tensors, metadata)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    ordered, data = {"__metadata__": metadata}, b""
    for name in tensors:
        start, stop = header[name]["data_offsets"]
        ordered[name] = header[name] | {"data_offsets": [len(data), len(data) + stop - start]}
        data += content[8 + length + start : 8 + length + stop]
    text = json.dumps(ordered).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
