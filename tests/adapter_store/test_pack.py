"""The packed file: golden bytes, determinism, and metadata that suffice to unpack it."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open

from adapter_store import pack
from adapter_store.rebuild import entry_of_file
from loraplex.layout import Layout, TargetModule
from loraplex.packed import FORMAT
from tests.adapter_store.samples import WIDTH, flux_layout, pack_file, peft, write_adapter

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
