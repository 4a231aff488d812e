"""One small file per cause of refusal, and what the store says of it: the examples of docs/reference.md.

The files are for FLUX.1-dev in F16, where it matters to nobody how large the real ones are.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from adapter_store.bases import known_layout
from adapter_store.errors import Cause
from adapter_store.fitting import fit_file
from adapter_store.pack import pack
from adapter_store.unpack import read_packed
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from loraplex.pack_options import EXACTLY

WIDTH, MAX_RANK, MAX_BYTES = 3072, 4, 1 << 20
_LINEAR = "transformer.transformer_blocks.0.attn.to_q"
_FLUX = known_layout("flux.1-dev", "flux.1-dev", "F16")
_KOHYA = "lora_unet_double_blocks_0_img_attn_proj"

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """A file that is refused with `cause`; `about` is what is wrong with it, as a person would say."""

    cause: Cause
    about: str
    content: bytes
    layout: Layout = _FLUX
    is_packed: bool = False

    def message(self) -> str:
        """What the store says. Raises RuntimeError when it is not refused for this cause."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file.safetensors"
            path.write_bytes(self.content)
            try:
                self._read(path)
            except AdapterRejected as error:
                if error.cause == self.cause.value:
                    return error.message
                raise RuntimeError(f"{self.cause.value}: refused as {error.cause}: {error.message}") from error
        raise RuntimeError(f"{self.cause.value}: {self.about} is not refused")

    def _read(self, path: Path) -> None:
        if self.is_packed:
            read_packed(path)
            return
        with open_file(path, MAX_BYTES) as file:
            pack(file, fit_file(file, None, self.layout, EXACTLY, MAX_RANK).packing)


def refusals() -> Iterator[Refusal]:
    """One per cause, in the order of the causes."""
    yield from (Refusal(cause, about, content) for cause, (about, content) in _CONTAINERS.items())
    yield Refusal(Cause.NOT_PACKED, "an ordinary adapter, given to `unpack`", _file(_lora()), is_packed=True)
    yield from (Refusal(cause, about, _file(make())) for cause, (about, make) in _TENSORS.items())
    names = ("proj.out_1", "proj_out.1")
    alike = Layout("a base", "APipeline", "F16", tuple(TargetModule("unet", name, "linear", 8, 8) for name in names))
    content = _file(_lora("lora_unet_proj_out_1", width=8, down="lora_down", up="lora_up"))
    yield Refusal(Cause.AMBIGUOUS_MODULE, f"underscores, where a base has {' and '.join(names)}", content, alike)
    wan = known_layout("wan2.2-t2v-a14b", "wan2.2-t2v-a14b", "F16")
    content = _file(_lora("lora_unet_blocks_0_attn1_to_q", width=5120, down="lora_down", up="lora_up"))
    yield Refusal(Cause.AMBIGUOUS_COMPONENT, "no word on which of the two denoisers of Wan 2.2", content, wan)
    config = json.dumps({"transformer.r": 2, "transformer.lora_alpha": 2, "transformer.rank_pattern": {"nowhere": 8}})
    yield Refusal(Cause.METADATA_INVALID, "a pattern for a module that is not there", _file(_lora(), _peft(config)))
    config = json.dumps({"transformer.r": 2, "transformer.lora_alpha": 8})
    conflict = {**_lora(), f"{_LINEAR}.alpha": _alpha(2)}
    yield Refusal(Cause.ALPHA_CONFLICT, "an alpha tensor and metadata that differ", _file(conflict, _peft(config)))


def _file(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    return bytes(safetensors.numpy.save(dict(tensors), metadata))


def _header(text: str, data: bytes = b"") -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def _peft(config: str) -> dict[str, str]:
    return {"lora_adapter_metadata": config}


def _lora(
    stem: str = _LINEAR, width: int = WIDTH, out: int = 0, rank: int = 2, value: float = 0.5, **names: str
) -> dict[str, Any]:
    down, up = names.get("down", "lora_A"), names.get("up", "lora_B")
    return {
        f"{stem}.{down}.weight": np.full((rank, width), value, np.float32),
        f"{stem}.{up}.weight": np.full((out or width, rank), value, np.float32),
    }


def _alpha(value: float) -> Any:
    return np.array(value, np.float32)


def _without_up() -> Tensors:
    return {key: tensor for key, tensor in _lora().items() if "lora_A" in key}


def _of_high_rank() -> Tensors:
    numbers = np.random.default_rng(0)
    return {key: numbers.standard_normal(one.shape).astype(np.float32) for key, one in _lora(rank=8).items()}


def _two_ranks() -> Tensors:
    return {**_lora(), f"{_LINEAR}.lora_B.weight": np.ones((WIDTH, 3), np.float32)}


_TENSOR = '"a.lora_A.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}'
_CONTAINERS: dict[Cause, tuple[str, bytes]] = {
    Cause.EMPTY_FILE: ("no bytes", b""),
    Cause.HTML_PAGE: ("a login page", b"<!DOCTYPE html><html><title>Log in</title></html>"),
    Cause.LFS_POINTER: ("what git keeps instead of it", b"version https://git-lfs.github.com/spec/v1\noid sha256:00"),
    Cause.PICKLE: ("a checkpoint of the old sort", b"\x80\x02}q\x00."),
    Cause.ARCHIVE: ("a `.pt` file, which is a zip archive", b"PK\x03\x04" + bytes(30)),
    Cause.GGUF: ("a GGUF file", b"GGUF\x03\x00\x00\x00"),
    Cause.NOT_SAFETENSORS: ("an image", b"\x89PNG\r\n\x1a\n" + bytes(30)),
    Cause.TRUNCATED: ("a copy that was broken off", _file(_lora())[:-100]),
    Cause.TRAILING_BYTES: ("bytes after the last tensor", _file(_lora()) + b"more"),
    Cause.FILE_TOO_LARGE: ("more than max_file_bytes, here 1 MiB", bytes(MAX_BYTES + 1)),
    Cause.HEADER_TOO_LARGE: ("a header of 64 MiB", (64 << 20).to_bytes(8, "little") + b"{"),
    Cause.HEADER_INVALID: ("a header that is no JSON", _header("{'a': 1}")),
    Cause.DUPLICATE_KEY: ("a key twice", _header(f"{{{_TENSOR},{_TENSOR}}}", bytes(4))),
    Cause.NO_TENSORS: ("metadata alone", _header('{"__metadata__":{"format":"pt"}}')),
    Cause.DTYPE_UNSUPPORTED: ("integers for numbers", _header(f"{{{_TENSOR.replace('F32', 'I32')}}}", bytes(4))),
    Cause.SHAPE_INVALID: ("a matrix without rows", _header(f"{{{_TENSOR.replace('[1,1]', '[0,1]')}}}", bytes(4))),
    Cause.OFFSETS_INVALID: ("a hole", _header(f"{{{_TENSOR.replace('[0,4]', '[4,8]')}}}", bytes(8))),
}
_TENSORS: dict[Cause, tuple[str, Callable[[], Tensors]]] = {
    Cause.UNKNOWN_KEY: ("an algorithm of its own", lambda: {f"{_LINEAR}.my_tensor": np.ones((2, 2), np.float32)}),
    Cause.UNKNOWN_MODULE: (
        "an adapter for a UNet, kohya's names",
        lambda: _lora("lora_unet_input_blocks_4_1_proj_in", 640, down="lora_down", up="lora_up"),
    ),
    Cause.COMPONENT_NOT_SERVED: (
        "an adapter for a UNet, diffusers' names",
        lambda: _lora("unet.down_blocks.1.attentions.0.proj_in", 640),
    ),
    Cause.UNSUPPORTED_ALGORITHM: (
        "DoRA",
        lambda: {**_lora(), f"{_LINEAR}.lora_magnitude_vector": np.ones(WIDTH, np.float32)},
    ),
    Cause.BIAS_DIFFERENCE: ("a bias", lambda: {**_lora(), f"{_LINEAR}.lora_B.bias": np.ones(WIDTH, np.float32)}),
    Cause.CONTROL_LORA: ("a depth LoRA of BFL", lambda: _lora("transformer.x_embedder", 128, WIDTH)),
    Cause.TEXTUAL_INVERSION: ("new tokens", lambda: {**_lora(), "bundle_emb.x.clip_l": np.ones((2, 768), np.float32)}),
    Cause.DUPLICATE_MODULE: (
        "a module in two namings, with other numbers",
        lambda: {
            **_lora("transformer.transformer_blocks.0.attn.to_out.0"),
            **_lora(_KOHYA, value=0.25, down="lora_down", up="lora_up"),
        },
    ),
    Cause.INCOMPLETE_PAIR: ("A without B", _without_up),
    Cause.RANK_MISMATCH: ("A of rank 2, B of rank 3", _two_ranks),
    Cause.SHAPE_MISMATCH: ("an adapter of a smaller model", lambda: _lora(width=1024)),
    Cause.RANK_TOO_LARGE: ("rank 8, where max_rank is 4", _of_high_rank),
    Cause.ALPHA_INVALID: ("alpha 0", lambda: {**_lora(), f"{_LINEAR}.alpha": _alpha(0)}),
    Cause.NOT_FINITE: ("a failed training", lambda: _lora(value=float("nan"))),
    Cause.OVERFLOW: ("numbers above 65504, for F16", lambda: _lora(value=1e5)),
    Cause.UNDERFLOW: ("numbers below what F16 has", lambda: _lora(value=1e-9)),
}
