"""What a file is that is no safetensors file, told by its first bytes. Nothing is parsed, unpacked or unpickled."""

import re
from collections.abc import Iterator

from adapter_store.errors import Cause, rejected
from loraplex.errors import AdapterRejected

# As many bytes as `recognise` wants to see: a tar archive says what it is at its 257th.
HEAD_BYTES = 1024

_ZIP = "a zip archive, perhaps a PyTorch checkpoint or an .npz"
_PICKLE = "a Python pickle"
_MARKUP = "a web page or XML, probably an error or login page of the site"
_JSON = "a JSON text, perhaps an error message of the site"
_INDEX = "the index of an adapter in several files (.safetensors.index.json)"

# first bytes, cause, what the file is
_BYTES: tuple[tuple[bytes, Cause, str], ...] = (
    (b"version https://git-lfs", Cause.LFS_POINTER, "a Git LFS pointer, not the file behind it"),
    (b"version https://hawser.github.com", Cause.LFS_POINTER, "a Git LFS pointer, not the file behind it"),
    (b"GGUF", Cause.GGUF, "a GGUF file"),
    *((magic, Cause.GGUF, "a GGML file") for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")),
    *((magic, Cause.ARCHIVE, _ZIP) for magic in (b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\7\x08", b"PK00PK")),
    (b"\x1f\x8b", Cause.ARCHIVE, "a gzip archive"),
    (b"\xfd7zXZ\0", Cause.ARCHIVE, "an xz archive"),
    (b"\x28\xb5\x2f\xfd", Cause.ARCHIVE, "a zstd archive"),
    (b"7z\xbc\xaf\x27\x1c", Cause.ARCHIVE, "a 7z archive"),
    (b"BZh", Cause.ARCHIVE, "a bzip2 archive"),
    (b"Rar!\x1a\x07", Cause.ARCHIVE, "a RAR archive"),
    (b"\x04\x22\x4d\x18", Cause.ARCHIVE, "an lz4 archive"),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", Cause.PICKLE, "a PyTorch checkpoint of the old kind, a pickle"),
    *((bytes((0x80, protocol)), Cause.PICKLE, _PICKLE) for protocol in range(6)),
    (b"\x89HDF\r\n\x1a\n", Cause.NOT_SAFETENSORS, "an HDF5 file, perhaps a Keras checkpoint"),
    (b"\x93NUMPY", Cause.NOT_SAFETENSORS, "a NumPy array (.npy)"),
    (b"\x89PNG\r\n\x1a\n", Cause.NOT_SAFETENSORS, "a PNG image"),
    (b"\xff\xd8\xff", Cause.NOT_SAFETENSORS, "a JPEG image"),
    (b"GIF8", Cause.NOT_SAFETENSORS, "a GIF image"),
    (b"RIFF", Cause.NOT_SAFETENSORS, "a RIFF file, perhaps a WebP image"),
    (b"%PDF", Cause.NOT_SAFETENSORS, "a PDF"),
    (b"SQLite format 3\0", Cause.NOT_SAFETENSORS, "an SQLite database"),
    (b"\x7fELF", Cause.NOT_SAFETENSORS, "a program"),
)

_PATTERNS = tuple(
    (re.compile(pattern, re.DOTALL), cause, what)
    for pattern, cause, what in (
        (rb".{257}ustar", Cause.ARCHIVE, "a tar archive"),
        (rb".{4}(TFL3|ftyp)", Cause.NOT_SAFETENSORS, "a TFLite model or a video"),
        # ir_version, then the producer's name or the graph
        (rb"\x08[\x01-\x20][\x12\x1a\x22\x2a\x3a]", Cause.NOT_SAFETENSORS, "an ONNX model"),
        # Protocols 0 and 1 have no signature: a mark or an empty container and the first memo, or a global.
        (rb"(\(dp\d|\(lp\d|\(t|[\]})][qr.]|c[\w.]+\n[\w.]+\n|[(]?[iV][^\n]{1,80}\n)", Cause.PICKLE, _PICKLE),
    )
)

# On text without byte order mark, white space and comments around it, in lower case.
_TEXTS = tuple(
    (re.compile(pattern), cause, what)
    for pattern, cause, what in (
        (r"<[!?a-z/]", Cause.HTML_PAGE, _MARKUP),
        (r'\{\s*"(metadata|weight_map)"\s*:', Cause.NOT_SAFETENSORS, _INDEX),
        (r'[\[{]\s*["{}\]\[\d]', Cause.NOT_SAFETENSORS, _JSON),
    )
)
_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_COMMENT = re.compile(r"\s*<!--.*?(-->|\Z)", re.DOTALL)


def recognise(head: bytes) -> AdapterRejected | None:
    """The refusal that names what a file is which begins with `head`; None when it may be anything."""
    return next(_findings(head), None)


def _findings(head: bytes) -> Iterator[AdapterRejected]:
    for signature, cause, what in _BYTES:
        if head.startswith(signature):
            yield rejected(cause, f"The file is {what}.")
    text = _text(head)
    for text_pattern, cause, what in _TEXTS:
        if text_pattern.match(text):
            yield rejected(cause, f"The file is {what}.")
    for pattern, cause, what in _PATTERNS:
        if pattern.match(head):
            yield rejected(cause, f"The file is {what}.")


def _text(head: bytes) -> str:
    text = head.decode(_UTF16.get(head[:2], "utf-8"), errors="replace").lstrip("\ufeff").lstrip().lower()
    while comment := _COMMENT.match(text):
        if comment.end() == len(text):
            break
        text = text[comment.end() :].lstrip()
    return text
