"""Layouts and adapter files for tests: a small Flux, and pairs as the trainers name them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from adapter_store import pack
from adapter_store.convert import Conversion
from adapter_store.dtypes import STORAGE_TYPES, Stored
from adapter_store.fitting import fit_file
from adapter_store.groups import FileGroups
from adapter_store.validate import RawFile, open_file
from loraplex.layout import Layout, TargetModule
from loraplex.pack_options import EXACTLY, PackOptions

Tensors = dict[str, torch.Tensor]
Float64 = NDArray[np.float64]

WIDTH = 32

# (name, in, out) of a FluxTransformer2DModel with two heads of 16.
_EMBEDDERS = tuple(
    (f"time_text_embed.{embedder}.linear_{n}", 256 if n == 1 and embedder != "text_embedder" else WIDTH, WIDTH)
    for embedder in ("timestep_embedder", "guidance_embedder", "text_embedder")
    for n in (1, 2)
)
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def flux_modules(width: int = WIDTH, double: int = 1, single: int = 1) -> list[tuple[str, int, int]]:
    """(name, in, out) of the linear layers of a Flux transformer."""
    modules = [*_EMBEDDERS, ("context_embedder", 32, width), ("x_embedder", 4, width)]
    for i in range(double):
        block = f"transformer_blocks.{i}"
        modules += [(f"{block}.norm1.linear", width, 6 * width), (f"{block}.norm1_context.linear", width, 6 * width)]
        modules += [(f"{block}.attn.{name}", width, width) for name in _ATTENTION]
        for ff in ("ff", "ff_context"):
            modules += [(f"{block}.{ff}.net.0.proj", width, 4 * width), (f"{block}.{ff}.net.2", 4 * width, width)]
    for i in range(single):
        block = f"single_transformer_blocks.{i}"
        modules += [(f"{block}.norm.linear", width, 3 * width), (f"{block}.proj_mlp", width, 4 * width)]
        modules += [(f"{block}.proj_out", 5 * width, width)]
        modules += [(f"{block}.attn.{name}", width, width) for name in _ATTENTION[:3]]
    return [*modules, ("norm_out.linear", width, 2 * width), ("proj_out", width, 4)]


def clip_modules(prefix: str = "") -> list[tuple[str, int, int]]:
    """(name, in, out) of one layer of a CLIP text encoder; `prefix` is "text_model." in older releases."""
    layer = f"{prefix}encoder.layers.0"
    attention = [(f"{layer}.self_attn.{name}_proj", 24, 24) for name in ("q", "k", "v", "out")]
    return [*attention, (f"{layer}.mlp.fc1", 24, 96), (f"{layer}.mlp.fc2", 96, 24)]


def t5_modules() -> list[tuple[str, int, int]]:
    """(name, in, out) of one block of a T5 encoder."""
    block = "encoder.block.0.layer"
    attention = [(f"{block}.0.SelfAttention.{name}", 40, 40) for name in "qkvo"]
    dense = [("wi_0", 40, 80), ("wi_1", 40, 80), ("wo", 80, 40)]
    return attention + [(f"{block}.1.DenseReluDense.{name}", i, o) for name, i, o in dense]


def flux_layout(dtype: str = "F32", text_model: str = "", **blocks: int) -> Layout:
    """The layout of a small FluxPipeline: transformer and both text encoders."""
    parts = {
        "transformer": flux_modules(**blocks),
        "text_encoder": clip_modules(text_model),
        "text_encoder_2": t5_modules(),
    }
    modules = tuple(
        TargetModule(component, name, "linear", inputs, outputs)
        for component, rows in parts.items()
        for name, inputs, outputs in rows
    )
    return Layout("tiny/flux", "FluxPipeline", dtype, modules)


def unet_layout(dtype: str = "F32") -> Layout:
    """A few modules of a Stable Diffusion UNet, with convolutions."""
    modules = (
        TargetModule("unet", "down_blocks.0.resnets.0.conv1", "conv2d", 8, 16, (3, 3)),
        TargetModule("unet", "down_blocks.0.attentions.0.proj_in", "conv2d", 16, 16),
        TargetModule("unet", "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", "linear", 16, 16),
    )
    return Layout("tiny/sd", "StableDiffusionPipeline", dtype, modules)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * sum(shape)))


def peft(name: str, out: int, inputs: int, rank: int, seed: int = 0) -> Tensors:
    """`name.lora_A.weight` and `name.lora_B.weight`."""
    return {
        f"{name}.lora_A.weight": numbers(rank, inputs, seed=seed),
        f"{name}.lora_B.weight": numbers(out, rank, seed=seed + 1),
    }


def kohya(name: str, out: int, inputs: int, rank: int, alpha: float | None = None, seed: int = 0) -> Tensors:
    """`name.lora_down.weight`, `name.lora_up.weight` and `name.alpha`."""
    tensors = {
        f"{name}.lora_down.weight": numbers(rank, inputs, seed=seed),
        f"{name}.lora_up.weight": numbers(out, rank, seed=seed + 1),
    }
    return tensors if alpha is None else tensors | {f"{name}.alpha": torch.tensor(float(alpha))}


def write_adapter(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata=dict(metadata or {})
    )
    return path


def fit_adapter(
    path: Path,
    layout: Layout,
    config: bytes | None = None,
    max_rank: int = 128,
    max_bytes: int = 1 << 30,
    options: PackOptions = EXACTLY,
) -> "Fitted":
    """All steps from a file to a packed one beside it, with the account of its tensors, which must be complete."""
    with open_file(path, max_bytes) as file:
        fitted = fit_file(file, config, layout, options, max_rank)
        account = fitted.conversion.accounting
        assert sorted((*account.applied, *account.zero, *account.waived)) == sorted(file.tensors)
        return Fitted(fitted.found, fitted.conversion, packed_sample(file, fitted.packing, path))


def packed_sample(file: RawFile, packing: pack.Packing, path: Path) -> "PackedSample":
    """The packed file of `file`, which lies at `path`."""
    target = path.with_name(f".{path.name}.packed")
    target.unlink(missing_ok=True)
    written = pack.write(file, packing, pack.Origin("0" * 64), target)
    packed = written.packed
    length = 8 + int.from_bytes(target.read_bytes()[:8], "little")
    shape = packed.rank, packing.width
    rows = np.frombuffer(target.read_bytes(), STORAGE_TYPES[packing.layout.dtype], offset=length).reshape(shape)
    return PackedSample(packed.module_indexes, packed.ranks, packed.errors, path, target, packing, rows)


@dataclass(frozen=True)
class Fitted:
    """What a file holds, where its tensors went, and what it was packed to."""

    found: FileGroups
    conversion: Conversion
    packed: "PackedSample"


@dataclass(frozen=True)
class PackedSample(pack.Packed):
    """What a file was packed to, with the packed file and its `rows` [rank, width]."""

    source: Path
    file: Path
    packing: pack.Packing
    rows: Stored

    def write(self, origin: pack.Origin, path: Path) -> tuple[str, int]:
        """Pack the file again, to `path`; sha256 and size in bytes."""
        with open_file(self.source, 1 << 30) as file:
            written = pack.write(file, self.packing, origin, path)
        return written.digest, written.size_bytes


def pack_file(
    path: Path, layout: Layout, config: bytes | None = None, max_rank: int = 128, max_bytes: int = 1 << 30
) -> PackedSample:
    """All steps from a file to rank rows."""
    return fit_adapter(path, layout, config, max_rank, max_bytes).packed


def dense(packed: PackedSample) -> dict[str, Float64]:
    """The dense difference of every module, from the packed file."""
    return unpack(packed.file)


def pack_tensors(
    folder: Path, layout: Layout, tensors: Tensors, max_rank: int = 128, **metadata: str
) -> dict[str, Float64]:
    """Write a file, pack it, and return the dense difference of every module that it touches."""
    path = write_adapter(folder / "adapter.safetensors", tensors, metadata)
    return dense(pack_file(path, layout, max_rank=max_rank))


def unpack(path: Path) -> dict[str, Float64]:
    """Module path -> B @ A in fp64, from nothing but the packed file, read by safetensors."""
    with safe_open(path, framework="pt") as file:
        modules, rows = json.loads(file.metadata()["modules"]), file.get_tensor("rows").double().numpy()
    dense, column = {}, 0
    for _, name, _, inputs, outputs, height, width in modules:
        a_width = inputs * height * width
        A, B = rows[:, column : column + a_width], rows[:, column + a_width : column + a_width + outputs]
        dense[name] = B.T @ A
        column += a_width + outputs
    assert column == rows.shape[1]
    return dense


def delta(tensors: Tensors, name: str, scaling: float = 1.0, rows: slice = slice(None)) -> Float64:
    """scaling * B[rows] @ A in fp64, of a pair made by `peft` or `kohya`."""
    A = tensors.get(f"{name}.lora_A.weight", tensors.get(f"{name}.lora_down.weight"))
    B = tensors.get(f"{name}.lora_B.weight", tensors.get(f"{name}.lora_up.weight"))
    assert A is not None and B is not None
    flat_A, flat_B = A.double().flatten(1).numpy(), B.double().flatten(1).numpy()
    return scaling * flat_B[rows] @ flat_A


def assert_equal(got: Mapping[str, Float64], expected: Mapping[str, Float64], tolerance: float = 1e-6) -> None:
    """The same modules, and every dense difference equal to `tolerance` of its largest number."""
    assert set(got) == set(expected)
    for name in expected:
        error = np.abs(got[name] - expected[name]).max()
        assert error <= tolerance * np.abs(expected[name]).max(), f"{name}: {error}"


def paths(layout: Layout, indexes: Iterable[int]) -> list[str]:
    """The paths of modules."""
    return [layout.modules[index].path for index in indexes]
