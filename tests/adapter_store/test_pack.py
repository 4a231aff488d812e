"""The packed file: golden bytes, determinism, and metadata that suffice to unpack it."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from adapter_store import pack
from adapter_store.cache import PackedCache
from adapter_store.fitting import fit_file
from adapter_store.rebuild import entry_of_file
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected, StorageExhausted
from loraplex.layout import Layout, TargetModule
from loraplex.pack_options import EXACTLY
from loraplex.packed import FORMAT
from tests.adapter_store.samples import WIDTH, flux_layout, numbers, pack_file, peft, unet_layout, write_adapter
from tests.adapter_store.test_cache_hostile import mounted

TINY = Layout(
    "tiny", "Other", "BF16", (TargetModule("unet", "a", "linear", 2, 3), TargetModule("unet", "b", "linear", 1, 1))
)

GOLDEN_HEADER = (
    '{"__metadata__":{"format":"loraplex-packed/1",'
    f'"layout":"{TINY.digest}","dtype":"BF16",'
    '"modules":"[[0,\\"unet.a\\",\\"linear\\",2,3,1,1]]","ranks":"[2]","errors":"[0.0]",'
    f'"source":"{"5" * 64}","config":"","options":"","waived":"0","converter":"3"}},'
    '"rows":{"dtype":"BF16","shape":[2,5],"data_offsets":[0,20]}}'
)
# Row j: row j of A, then column j of B times alpha / rank = 1/2.
GOLDEN_ROWS = [[1.0, 2.0, 0.5, 1.5, 2.5], [-3.0, 4.0, 1.0, 2.0, 3.0]]


def golden_adapter(folder: Path) -> Path:
    tensors = {
        "unet.a.lora_A.weight": torch.tensor([[1.0, 2.0], [-3.0, 4.0]]),
        "unet.a.lora_B.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        "unet.a.alpha": torch.tensor(1.0),
    }
    return write_adapter(folder / "a.safetensors", tensors)


def test_a_packed_file_has_exactly_these_bytes(tmp_path: Path):
    path = tmp_path / "packed"
    digest, size_bytes = pack_file(golden_adapter(tmp_path), TINY).write(pack.Origin("5" * 64), path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert content[8 : 8 + length].decode().rstrip(" ") == GOLDEN_HEADER
    assert length % 8 == 0
    assert content[8 + length :] == torch.tensor(GOLDEN_ROWS).bfloat16().view(torch.uint8).numpy().tobytes()
    assert (digest, size_bytes) == (hashlib.sha256(content).hexdigest(), len(content))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_numbers_that_need_no_arithmetic_become_the_same_rows_as_those_that_do(
    tmp_path: Path, dtype: str, kernel: tuple[int, ...]
):
    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    name = "unet.down_blocks.0.resnets.0.conv1" if kernel else "unet.down_blocks.0.attentions.0.proj_in"
    inputs = 8 if kernel else 16
    A, B = numbers(4, inputs, *kernel).to(torch_dtype), numbers(16, 4, *(1, 1) * bool(kernel)).to(torch_dtype)
    A.view(-1)[:4] = torch.tensor([-0.0, 0.0, torch.finfo(torch_dtype).tiny / 2, torch.finfo(torch_dtype).max])
    pair = {f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": B}
    copied = pack_file(write_adapter(tmp_path / "a.safetensors", pair), unet_layout(dtype))
    wider = {key: value.double() for key, value in pair.items()}
    converted = pack_file(write_adapter(tmp_path / "b.safetensors", wider), unet_layout(dtype))
    assert copied.rows.tobytes() == converted.rows.tobytes()
    assert copied.file.read_bytes() == converted.file.read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["A", "B"])
def test_numbers_that_need_no_arithmetic_are_refused_unless_finite(
    tmp_path: Path, dtype: torch.dtype, bad: float, part: str
):
    tensors = {key: value.to(dtype) for key, value in peft("transformer.proj_out", 4, WIDTH, 2).items()}
    tensors[f"transformer.proj_out.lora_{part}.weight"].view(-1)[-1] = bad
    layout = flux_layout({torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype])
    with pytest.raises(AdapterRejected) as refused:
        pack_file(write_adapter(tmp_path / "a.safetensors", tensors), layout)
    assert (refused.value.cause, refused.value.key) == ("NOT_FINITE", f"transformer.proj_out.lora_{part}.weight")


def test_safetensors_reads_it(tmp_path: Path):
    path = tmp_path / "packed"
    pack_file(golden_adapter(tmp_path), TINY).write(pack.Origin("5" * 64), path)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["rows"]
        assert file.get_tensor("rows").tolist() == GOLDEN_ROWS
        assert file.metadata()["format"] == FORMAT
        assert json.loads(file.metadata()["ranks"]) == [2]


def test_the_same_input_gives_the_same_bytes_whatever_the_order_of_its_keys(tmp_path: Path):
    tensors = peft("transformer.transformer_blocks.0.attn.to_q", WIDTH, WIDTH, 4)
    tensors |= peft("transformer.transformer_blocks.0.attn.to_k", WIDTH, WIDTH, 2)
    digests = set()
    for number, names in enumerate((list(tensors), list(reversed(tensors)))):
        path = write_adapter(tmp_path / f"{number}.safetensors", {name: tensors[name] for name in names})
        digests.add(pack_file(path, flux_layout()).write(pack.Origin("5" * 64), tmp_path / str(number))[0])
    assert len(digests) == 1


def test_the_entry_of_the_cache_can_be_made_from_the_file_alone(tmp_path: Path):
    path = tmp_path / "packed.safetensors"
    _, size_bytes = pack_file(golden_adapter(tmp_path), TINY).write(pack.Origin("5" * 64), path)
    entry = entry_of_file(path)
    assert entry is not None
    assert (entry.rank, entry.module_indexes, entry.size_bytes) == (2, (0,), size_bytes)
    assert entry.layout_digest == TINY.digest
    assert entry_of_file(golden_adapter(tmp_path)) is None


def test_a_disk_that_fills_up_while_rows_are_written_is_storage_exhausted(tmp_path: Path):
    layout, big = Layout("tiny", "Other", "F32", (TargetModule("unet", "a", "linear", 4096, 4096),)), "unet.a"
    source = write_adapter(tmp_path / "big.safetensors", peft(big, 4096, 4096, 128))
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=3m", "tmpfs"), open_file(source, 1 << 30) as file:
        cache = PackedCache(tmp_path / "small", 1 << 30)
        packing = pack.Packing(layout, fit_file(file, None, layout, EXACTLY, 128).conversion.placed, 128)
        with pytest.raises(StorageExhausted), cache.temp_file() as temp:
            pack.write(file, packing, pack.Origin("5" * 64), temp)
        assert list((tmp_path / "small" / "temp").iterdir()) == []
        cache.close()
