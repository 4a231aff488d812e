"""Files that are something else: each is told by its name, whatever it is called. None of them is ever unpickled."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected

PAGE = "<html><head><title>Sign in</title></head></html>"


class Trap:
    """Unpickling it would end the test."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.exit, ("a pickle was read",))


def zipped(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return stream.getvalue()


def tarred() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.safetensors"))
    return stream.getvalue()


def checkpoint(as_zip: bool) -> bytes:
    stream = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, stream, _use_new_zipfile_serialization=as_zip)
    return stream.getvalue()


def array(save: object = np.save) -> bytes:
    stream = io.BytesIO()
    save(stream, np.zeros(3))  # type: ignore[operator]
    return stream.getvalue()


# what it is, content, cause, a word of the message
KINDS: list[tuple[str, bytes, str, str]] = [
    ("empty", b"", "EMPTY_FILE", "empty"),
    ("one byte", b"\0", "TRUNCATED", "1 bytes"),
    ("zeros", bytes(4096), "NOT_SAFETENSORS", "no JSON header"),
    ("noise", bytes(range(255, 0, -1)) * 9, "NOT_SAFETENSORS", "header of"),
    ("page", PAGE.encode(), "HTML_PAGE", "web page"),
    ("page in capitals", b"\r\n\t <!DOCTYPE HTML PUBLIC>", "HTML_PAGE", "web page"),
    ("page with a mark", b"\xef\xbb\xbf \n<html>", "HTML_PAGE", "web page"),
    ("page with a mark, UTF-16", b"\xff\xfe" + PAGE.encode("utf-16-le"), "HTML_PAGE", "web page"),
    ("page, UTF-16 of the other order", b"\xfe\xff" + PAGE.encode("utf-16-be"), "HTML_PAGE", "web page"),
    ("page after comments", b"<!-- a -->\n<!-- b -->  <body>", "HTML_PAGE", "web page"),
    ("page in a comment without end", b"<!-- " + b"a" * 5000, "HTML_PAGE", "web page"),
    ("XML of an object store", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "HTML_PAGE", "XML"),
    ("XML alone", b"<Error><Code>NoSuchKey</Code></Error>", "HTML_PAGE", "XML"),
    ("JSON error", b'{"error":"Repository not found"}', "NOT_SAFETENSORS", "error message"),
    ("JSON error with a mark", b'\xef\xbb\xbf\n{ "error": "Invalid credentials" }', "NOT_SAFETENSORS", "error message"),
    ("JSON list", b'[{"message": "Not found"}]', "NOT_SAFETENSORS", "JSON"),
    ("index", json.dumps({"metadata": {"total_size": 1}, "weight_map": {}}).encode(), "NOT_SAFETENSORS", "index"),
    ("LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "LFS_POINTER", "LFS"),
    ("old LFS pointer", b"version https://hawser.github.com/spec/v1\noid sha256:0\n", "LFS_POINTER", "LFS"),
    *((f"pickle {n}", pickle.dumps(Trap(), protocol=n), "PICKLE", "pickle") for n in range(6)),
    *((f"pickled dict {n}", pickle.dumps({"a": [1.5]}, protocol=n), "PICKLE", "pickle") for n in range(6)),
    *((f"pickled list {n}", pickle.dumps([1, "b"], protocol=n), "PICKLE", "pickle") for n in range(6)),
    ("old checkpoint", checkpoint(as_zip=False), "PICKLE", "PyTorch checkpoint of the old kind"),
    ("checkpoint", checkpoint(as_zip=True), "ARCHIVE", "PyTorch checkpoint"),
    ("zip", zipped("a.safetensors"), "ARCHIVE", "zip"),
    ("empty zip", zipped(), "ARCHIVE", "zip"),
    ("spanned zip", b"PK\7\x08" + zipped("a"), "ARCHIVE", "zip"),
    ("spanned zip in one piece", b"PK00" + zipped("a"), "ARCHIVE", "zip"),
    ("npz", array(np.savez), "ARCHIVE", "npz"),
    ("tar", tarred(), "ARCHIVE", "tar"),
    ("tar.gz", gzip.compress(tarred()), "ARCHIVE", "gzip"),
    ("xz", lzma.compress(b"a"), "ARCHIVE", "xz"),
    ("bzip2", bz2.compress(b"a"), "ARCHIVE", "bzip2"),
    ("zstd", b"\x28\xb5\x2f\xfd\x04\x58\x09\0\0a\n", "ARCHIVE", "zstd"),
    ("7z", b"7z\xbc\xaf\x27\x1c\0\4" + bytes(30), "ARCHIVE", "7z"),
    ("rar", b"Rar!\x1a\x07\1\0", "ARCHIVE", "RAR"),
    ("lz4", b"\x04\x22\x4d\x18\x64\x40\xa7", "ARCHIVE", "lz4"),
    ("GGUF", b"GGUF\3\0\0\0" + bytes(16), "GGUF", "GGUF"),
    ("GGUF of 123 tensors", b"GGUF\3\0\0\0{" + bytes(15), "GGUF", "GGUF"),
    *((f"GGML {magic!r}", magic + bytes(40), "GGUF", "GGML") for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")),
    ("ONNX", b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\x80\x01", "NOT_SAFETENSORS", "ONNX"),
    ("HDF5", b"\x89HDF\r\n\x1a\n" + bytes(40), "NOT_SAFETENSORS", "HDF5"),
    ("npy", array(), "NOT_SAFETENSORS", "NumPy"),
    ("PNG", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "NOT_SAFETENSORS", "PNG"),
    ("JPEG", b"\xff\xd8\xff\xe0\0\x10JFIF\0", "NOT_SAFETENSORS", "JPEG"),
    ("WebP", b"RIFF\x24\0\0\0WEBPVP8 ", "NOT_SAFETENSORS", "WebP"),
    ("GIF", b"GIF89a" + bytes(20), "NOT_SAFETENSORS", "GIF"),
    ("PDF", b"%PDF-1.7\n", "NOT_SAFETENSORS", "PDF"),
    ("video", b"\0\0\0\x18ftypmp42", "NOT_SAFETENSORS", "video"),
    ("SQLite", b"SQLite format 3\0" + bytes(84), "NOT_SAFETENSORS", "SQLite"),
    ("a text", b"Entry not found", "NOT_SAFETENSORS", "header of"),
    ("bare mark", b"\xef\xbb\xbf", "TRUNCATED", "3 bytes"),
    ("mark before the header", (20).to_bytes(8, "little") + b"\xef\xbb\xbf{}" + b" " * 15, "NOT_SAFETENSORS", "JSON"),
]


@pytest.mark.parametrize(("content", "cause", "word"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_what_is_no_safetensors_file_is_told_by_its_name(tmp_path: Path, content: bytes, cause: str, word: str):
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(content)
    with pytest.raises(AdapterRejected) as refused, open_file(path, 1 << 20):
        pass
    assert refused.value.cause == cause
    assert word in refused.value.message


@pytest.mark.parametrize("name", [kind[0] for kind in KINDS])
@pytest.mark.parametrize("length", [3, 9, 30])
def test_the_first_bytes_alone_are_refused_too(tmp_path: Path, name: str, length: int):
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(next(content for kind, content, *_ in KINDS if kind == name)[:length])
    with pytest.raises(AdapterRejected), open_file(path, 1 << 20):
        pass
