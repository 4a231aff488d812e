"""Every reason of refusal is provoked by a file at least."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adapter_store.errors import Cause
from adapter_store.unpack import read_packed
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import Tensors, flux_layout, kohya, pack_file, write_adapter
from tests.hostile.test_store_files import ADAPTERS, CONTAINERS, GOOD, METADATA, TO_Q, with_value

Provoke = Callable[[Path], object]


def _ambiguous(path: Path) -> object:
    modules = tuple(TargetModule("transformer", name, "linear", 8, 8) for name in ("a_b.c", "a.b_c"))
    return pack_file(write_adapter(path, kohya("lora_unet_a_b_c", 8, 8, 2)), Layout("tiny", "Other", "F32", modules))


def _two_denoisers(path: Path) -> object:
    modules = tuple(
        TargetModule(one, "blocks.0.attn1.to_q", "linear", 8, 8) for one in ("transformer", "transformer_2")
    )
    layout = Layout("tiny", "WanPipeline", "F32", modules)
    return pack_file(write_adapter(path, kohya("lora_unet_blocks_0_self_attn_q", 8, 8, 2)), layout)


def _noted(text: str) -> Provoke:
    tensors = kohya(TO_Q, 32, 32, 4, alpha=2)
    return lambda path: pack_file(write_adapter(path, tensors, {"lora_adapter_metadata": text}), flux_layout())


def _built(build: Callable[[], Tensors], dtype: str = "F32") -> Provoke:
    return lambda path: pack_file(write_adapter(path, build()), flux_layout(dtype), max_rank=16)


def _written(content: bytes) -> Provoke:
    def provoke(path: Path) -> object:
        path.write_bytes(content)
        return pack_file(path, flux_layout())

    return provoke


# In the order of how much a file has to be right to get so far; the first of a cause counts.
FILES: list[tuple[Cause, Provoke]] = [
    *((cause, _written(content)) for content, cause, _ in CONTAINERS.values()),
    *((cause, _built(build)) for build, cause, _ in ADAPTERS.values()),
    *((cause, _noted(text)) for text, cause in METADATA.values()),
    (Cause.FILE_TOO_LARGE, lambda path: pack_file(write_adapter(path, GOOD), flux_layout(), max_bytes=100)),
    (Cause.NOT_PACKED, lambda path: read_packed(write_adapter(path, GOOD))),
    (Cause.AMBIGUOUS_MODULE, _ambiguous),
    (Cause.AMBIGUOUS_COMPONENT, _two_denoisers),
    (Cause.OVERFLOW, _built(lambda: with_value(1e6), "F16")),
    (Cause.UNDERFLOW, _built(lambda: {name: tensor * 1e-9 for name, tensor in GOOD.items()}, "F16")),
    (Cause.NO_TENSORS, _built(lambda: {f"{TO_Q}.diff": torch.zeros(32, 32)})),
]


@pytest.mark.parametrize("cause", list(Cause), ids=lambda cause: cause.value)
def test_a_file_provokes(tmp_path: Path, cause: Cause):
    provoke = next((provoke for of, provoke in FILES if of is cause), None)
    assert provoke is not None, f"no hostile file for {cause.value}"
    with pytest.raises(AdapterRejected) as refused:
        provoke(tmp_path / "a.safetensors")
    assert refused.value.cause == cause.value
