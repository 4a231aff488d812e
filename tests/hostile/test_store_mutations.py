"""Whatever is done to a good file, the store either packs it or refuses it; no other error ever leaves."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_store.dialects.suffixes import split_suffix
from adapter_store.refs import AdapterRef
from adapter_store.scaling import read_configs
from loraplex.errors import AdapterRejected, InvalidAdapterRef
from tests.adapter_store.samples import WIDTH, flux_layout, kohya, pack_file, write_adapter

LAYOUT = flux_layout()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations")


@pytest.fixture(scope="module")
def good(folder: Path) -> bytes:
    tensors = kohya("lora_unet_double_blocks_0_img_attn_qkv", 3 * WIDTH, WIDTH, 2, alpha=1)
    return write_adapter(folder / "good.safetensors", tensors, {"lora_adapter_metadata": "{}"}).read_bytes()


@given(
    changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=6),
    cut=st.none() | st.integers(0, 2000),
)
@settings(max_examples=300, deadline=None)
def test_changed_and_cut_bytes(folder: Path, good: bytes, changes: list[tuple[int, int]], cut: int | None):
    content = bytearray(good)
    for place, value in changes:
        content[place % len(content)] = value
    path = folder / "mutated.safetensors"
    path.write_bytes(content[:cut])
    with contextlib.suppress(AdapterRejected):
        pack_file(path, LAYOUT)


@given(content=st.binary(max_size=600))
@settings(max_examples=200, deadline=None)
def test_any_bytes(folder: Path, content: bytes):
    path = folder / "any.safetensors"
    path.write_bytes(content)
    with pytest.raises(AdapterRejected):
        pack_file(path, LAYOUT)


@given(key=st.text(max_size=60), end=st.sampled_from(["", ".lora_A.weight", ".alpha", ".diff", ".lora_B.x.weight"]))
def test_any_key(key: str, end: str):
    with contextlib.suppress(AdapterRejected):
        split_suffix(key + end)


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = st.sampled_from(["transformer.r", "transformer.lora_alpha", "transformer.alpha_pattern", "peft_type", "."])


@given(fields=st.dictionaries(_FIELDS, _JSON))
def test_any_metadata(fields: dict[str, object]):
    with contextlib.suppress(AdapterRejected):
        for config in read_configs({"lora_adapter_metadata": json.dumps(fields)}, None).values():
            config.alpha_of("a.b")
            config.rank_of("a.b")


@given(text=st.text(max_size=80))
def test_any_reference(text: str):
    with contextlib.suppress(InvalidAdapterRef):
        assert AdapterRef.parse(str(AdapterRef.parse(text))) == AdapterRef.parse(text)
