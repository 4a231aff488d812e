"""Opening a file: what is on the disk may change meanwhile, may be no file, and may hold any text."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2
from safetensors import safe_open

from adapter_store.errors import Cause, quoted, rejected
from adapter_store.header import MAX_NAME_LENGTH
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected, SourceUnavailable
from tests.adapter_store.samples import numbers, peft, write_adapter

LIMIT = 1 << 30
NAME = "transformer.x_embedder.lora_B.weight"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a.safetensors", peft("transformer.x_embedder", 32, 4, 4), {"format": "pt"})


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with a header made by hand: a JSON text or what becomes one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def refuse(path: Path) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as refused, open_file(path, LIMIT):
        pass
    return refused.value


def test_a_checked_file_has_its_tensors_in_the_order_of_its_header_and_its_metadata(adapter: Path):
    with open_file(adapter, LIMIT) as file, safe_open(adapter, framework="np") as reference:
        assert list(file.tensors) == list(reference.keys())
        assert file.metadata == {"format": "pt"}
        for name in file.tensors:
            assert (file.load(name) == reference.get_tensor(name)).all()


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(tmp_path: Path):
    adapter = write_adapter(tmp_path / "a.safetensors", {NAME: numbers(512, 512)})
    with pytest.raises(AdapterRejected) as refused, open_file(adapter, LIMIT) as file:
        os.truncate(adapter, 300)
        file.load(NAME)
    assert (refused.value.cause, refused.value.key) == ("TRUNCATED", NAME)


@pytest.mark.parametrize("change", ["grown", "written to", "cut after the last read"])
def test_a_file_that_is_written_to_while_it_is_read_has_to_be_read_again(adapter: Path, change: str):
    os.utime(adapter, ns=(0, 0))
    with pytest.raises(SourceUnavailable), open_file(adapter, LIMIT) as file:
        file.load(NAME)
        if change == "grown":
            with adapter.open("ab") as stream:
                stream.write(b"\0")
        elif change == "written to":
            with adapter.open("r+b") as stream:
                stream.seek(-4, os.SEEK_END)
                stream.write(b"\0\0\0\0")
        else:
            os.truncate(adapter, adapter.stat().st_size - 1)


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(adapter: Path):
    with open_file(adapter, LIMIT) as file:
        before = file.load(NAME)
        other = peft("transformer.x_embedder", 32, 4, 4, seed=9)
        write_adapter(adapter.with_name("b.safetensors"), other).replace(adapter)
        assert (file.load(NAME) == before).all()


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    error = refuse(tmp_path / "pipe.safetensors")
    assert error.cause == "NOT_SAFETENSORS"
    assert "pipe" in error.message


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "."])
def test_devices_and_folders_are_no_files(path: str):
    assert refuse(Path(path)).cause == "NOT_SAFETENSORS"


def test_what_is_not_there_is_an_error_of_the_system(tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for name in ("a", "c"):
        with pytest.raises(OSError), open_file(tmp_path / name, LIMIT):
            pass


HOSTILE_NAMES = {
    "clears the terminal": "\x1b[2J\x1b]0;owned\x07.lora_A.weight",
    "NUL": "a\0b.lora_A.weight",
    "new lines": "a\r\nb: c.lora_A.weight",
    "right to left": "a\u202eb.lora_A.weight",
    "byte order mark": "\ufeffa.lora_A.weight",
    "half a surrogate pair": "a\ud800.lora_A.weight",
    "a megabyte": "a" * (1 << 20),
    "one too long": "a" * (MAX_NAME_LENGTH + 1),
    "empty": "",
}


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_could_harm_a_reader_is_refused_and_arrives_escaped(tmp_path: Path, name: str):
    key = HOSTILE_NAMES[name]
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    error = refuse(write(tmp_path / "a.safetensors", {key: entry}, b"\0" * 4))
    assert error.cause == "HEADER_INVALID"
    assert error.message.isprintable()
    assert error.key.isprintable()
    assert len(error.key) <= 200
    assert len(error.message) <= 300
    error_details_pb2.ErrorInfo(metadata=error.metadata).SerializeToString()


@pytest.mark.parametrize("place", ["in the file", "in an entry", "in the metadata"])
def test_a_hostile_name_that_stands_twice_arrives_escaped(tmp_path: Path, place: str):
    twice = b'{"\\u001b[2J\\ud800": 1, "\\u001b[2J\\ud800": 1}'
    text = {"in the file": twice, "in an entry": b'{"a": ' + twice + b"}"}
    error = refuse(write(tmp_path / "a.safetensors", text.get(place, b'{"__metadata__": ' + twice + b"}")))
    assert (error.cause, error.key) == ("DUPLICATE_KEY", "\\x1b[2J\\ud800")
    assert error.message.isprintable()


def test_every_refusal_can_be_printed_and_sent():
    error = rejected(Cause.UNKNOWN_KEY, "a\x1b[2J\ud800\nb", "k\x1b\udfff" * 200)
    assert error.message == "a\\x1b[2J\\ud800\\nb"
    assert error.key.isprintable()
    assert len(error.key) == 200
    assert rejected(Cause.UNKNOWN_KEY, "Ümlaut 漢字", "ü").message == "Ümlaut 漢字"


@pytest.mark.parametrize("text", ["a" * 500, "\x1b" * 500, "\U000e0001" * 500, "漢" * 500])
def test_foreign_text_is_quoted_up_to_200_characters(text: str):
    assert len(quoted(text)) <= 200
    assert quoted(text).isprintable()


ENTRIES: dict[str, bytes] = {
    "minus nothing": b'{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}',
    "a fraction": b'{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}',
    "an exponent": b'{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}',
    "a huge exponent": b'{"dtype":"F32","shape":[1e999999999],"data_offsets":[0,4]}',
    "NaN": b'{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}',
    "Infinity": b'{"dtype":"F32","shape":[1],"data_offsets":[0,Infinity]}',
    "a huge number": b'{"dtype":"F32","shape":[1' + b"0" * 4000 + b'],"data_offsets":[0,4]}',
    "a longer number": b'{"dtype":"F32","shape":[1' + b"0" * 100_000 + b'],"data_offsets":[0,4]}',
    "true": b'{"dtype":"F32","shape":[true],"data_offsets":[0,4]}',
    "null": b"null",
    "three offsets": b'{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}',
    "another field": b'{"dtype":"F32","shape":[1],"data_offsets":[0,4],"device":"cpu"}',
    "dtype of a list": b'{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}',
    "a field twice": b'{"dtype":"F32","shape":[1],"data_offsets":[0,4],"shape":[1]}',
    "backwards": b'{"dtype":"F32","shape":[1],"data_offsets":[4,0]}',
    "a million dimensions": b'{"dtype":"F32","shape":[1' + b",1" * 100_000 + b'],"data_offsets":[0,4]}',
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_is_not_as_it_must_be_is_refused(tmp_path: Path, name: str):
    error = refuse(write(tmp_path / "a.safetensors", b'{"a":' + ENTRIES[name] + b"}", b"\0" * 4))
    assert error.cause in {"HEADER_INVALID", "DTYPE_UNSUPPORTED", "DUPLICATE_KEY", "OFFSETS_INVALID", "SHAPE_INVALID"}
    assert error.key == ("shape" if name == "a field twice" else "a")
    assert len(error.message) < 400


METADATA: dict[str, bytes] = {
    "null": b"null",
    "a list": b'["a"]',
    "a number": b'{"a": 1}',
    "nested": b'{"a": {"b": "c"}}',
    "NaN": b'{"a": NaN}',
    "half a surrogate pair": b'{"a": "\\ud800"}',
    "a name of half a surrogate pair": b'{"\\udc00": ""}',
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_are_no_table_of_texts_are_refused(tmp_path: Path, name: str):
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    path = write(tmp_path / "a.safetensors", b'{"__metadata__":' + METADATA[name] + b"," + entry + b"}", b"\0" * 4)
    error = refuse(path)
    assert (error.cause, error.key) == ("HEADER_INVALID", "__metadata__")


def test_metadata_may_hold_any_text_that_is_unicode(tmp_path: Path):
    metadata = {"ss_tag_frequency": json.dumps({"a": {'b "\\\x1b': 1}} | {str(n): [n] * 9 for n in range(5000)})}
    path = write_adapter(tmp_path / "a.safetensors", {"a.alpha": numbers(1)}, metadata)
    with open_file(path, LIMIT) as file:
        assert file.metadata == metadata
