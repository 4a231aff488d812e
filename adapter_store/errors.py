"""Why a file is refused: every cause with what a caller can do about it.

All of them reach the caller as `loraplex.errors.AdapterRejected`, whose metadata name the cause and the first bad key.
"""

from enum import Enum

from loraplex.errors import AdapterRejected

_DOWNLOAD_AGAIN = "Upload or download the file again; what lies there is not the adapter."
_RESAVE = "Save the adapter again with a current release of safetensors."
_RETRAIN = "The training failed or diverged; use an earlier checkpoint of it."


class Cause(str, Enum):
    """UPPER_SNAKE causes; stable, part of the contract."""

    # The container.
    EMPTY_FILE = "EMPTY_FILE"
    HTML_PAGE = "HTML_PAGE"
    LFS_POINTER = "LFS_POINTER"
    PICKLE = "PICKLE"
    ARCHIVE = "ARCHIVE"
    GGUF = "GGUF"
    NOT_SAFETENSORS = "NOT_SAFETENSORS"
    NOT_PACKED = "NOT_PACKED"
    TRUNCATED = "TRUNCATED"
    TRAILING_BYTES = "TRAILING_BYTES"
    FILE_TOO_LARGE = "FILE_TOO_LARGE"
    HEADER_TOO_LARGE = "HEADER_TOO_LARGE"
    HEADER_INVALID = "HEADER_INVALID"
    DUPLICATE_KEY = "DUPLICATE_KEY"
    NO_TENSORS = "NO_TENSORS"
    DTYPE_UNSUPPORTED = "DTYPE_UNSUPPORTED"
    SHAPE_INVALID = "SHAPE_INVALID"
    OFFSETS_INVALID = "OFFSETS_INVALID"
    # The names.
    UNKNOWN_KEY = "UNKNOWN_KEY"
    UNKNOWN_MODULE = "UNKNOWN_MODULE"
    AMBIGUOUS_MODULE = "AMBIGUOUS_MODULE"
    AMBIGUOUS_COMPONENT = "AMBIGUOUS_COMPONENT"
    COMPONENT_NOT_SERVED = "COMPONENT_NOT_SERVED"
    UNSUPPORTED_ALGORITHM = "UNSUPPORTED_ALGORITHM"
    BIAS_DIFFERENCE = "BIAS_DIFFERENCE"
    CONTROL_LORA = "CONTROL_LORA"
    TEXTUAL_INVERSION = "TEXTUAL_INVERSION"
    DUPLICATE_MODULE = "DUPLICATE_MODULE"
    INCOMPLETE_PAIR = "INCOMPLETE_PAIR"
    # The shapes and the scaling.
    RANK_MISMATCH = "RANK_MISMATCH"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    RANK_TOO_LARGE = "RANK_TOO_LARGE"
    ALPHA_INVALID = "ALPHA_INVALID"
    ALPHA_CONFLICT = "ALPHA_CONFLICT"
    METADATA_INVALID = "METADATA_INVALID"
    # The numbers.
    NOT_FINITE = "NOT_FINITE"
    OVERFLOW = "OVERFLOW"
    UNDERFLOW = "UNDERFLOW"


REMEDIES: dict[Cause, str] = {
    Cause.EMPTY_FILE: _DOWNLOAD_AGAIN,
    Cause.HTML_PAGE: _DOWNLOAD_AGAIN,
    Cause.LFS_POINTER: "Fetch the file behind the pointer with `git lfs pull`, or name the repository on the hub.",
    Cause.PICKLE: "Convert the checkpoint to safetensors on a machine that trusts it; pickles are never read here.",
    Cause.ARCHIVE: "Unpack the archive and name the one .safetensors file in it.",
    Cause.GGUF: "Use the adapter's safetensors file; GGUF is not read here.",
    Cause.NOT_SAFETENSORS: "Use a .safetensors file.",
    Cause.NOT_PACKED: "Unpack a file that `pack` wrote, or that lies in a store's cache.",
    Cause.TRUNCATED: "The file is incomplete: copy or download it again.",
    Cause.TRAILING_BYTES: _RESAVE,
    Cause.FILE_TOO_LARGE: "Use an adapter and not a full checkpoint, or raise the store's max_file_bytes.",
    Cause.HEADER_TOO_LARGE: _RESAVE,
    Cause.HEADER_INVALID: _RESAVE,
    Cause.DUPLICATE_KEY: _RESAVE,
    Cause.NO_TENSORS: "Use a file that holds an adapter.",
    Cause.DTYPE_UNSUPPORTED: "Save the tensors as F32, F16 or BF16.",
    Cause.SHAPE_INVALID: "Save the adapter with matrices of rank 1 or more.",
    Cause.OFFSETS_INVALID: _RESAVE,
    Cause.UNKNOWN_KEY: "Save the adapter in the peft (diffusers) or kohya naming.",
    Cause.UNKNOWN_MODULE: "Use an adapter that was trained for this base model.",
    Cause.AMBIGUOUS_MODULE: "Save the adapter with dotted names, as diffusers does.",
    Cause.AMBIGUOUS_COMPONENT: "Say which denoiser it is for (option `denoiser`), or save it with component names.",
    Cause.COMPONENT_NOT_SERVED: "Train or extract it without that component, or use an executor that adapts it.",
    Cause.UNSUPPORTED_ALGORITHM: "Extract a plain LoRA from the trained model, or train one.",
    Cause.BIAS_DIFFERENCE: "Train or extract the adapter without biases.",
    Cause.CONTROL_LORA: "A control LoRA changes the base model itself: load it as a base model of its own.",
    Cause.TEXTUAL_INVERSION: "Remove the bundled embeddings from the file, or train without new tokens.",
    Cause.DUPLICATE_MODULE: "Save the adapter once, in one naming.",
    Cause.INCOMPLETE_PAIR: "Save the adapter again: both matrices of a module are needed.",
    Cause.RANK_MISMATCH: "Save the adapter again: A and B of a module must have one rank.",
    Cause.SHAPE_MISMATCH: "Use an adapter that was trained for this base model.",
    Cause.RANK_TOO_LARGE: "Resize the adapter, allow a cut with max_error, or raise the store's max_rank.",
    Cause.ALPHA_INVALID: "Save the adapter with a positive alpha; to trainers that write 0 it means alpha = rank.",
    Cause.ALPHA_CONFLICT: "Remove the wrong one: the file says two different things about its scaling.",
    Cause.METADATA_INVALID: "Save the adapter again with a current release of diffusers or peft.",
    Cause.NOT_FINITE: _RETRAIN,
    Cause.OVERFLOW: "Resave the adapter with smaller numbers, or serve the base model in BF16.",
    Cause.UNDERFLOW: "Serve the base model in BF16 or F32: these numbers are too small for F16.",
}


def rejected(cause: Cause, message: str, key: str = "") -> AdapterRejected:
    """The error to raise for `cause`; `key` is the first bad key of the file, empty when the whole file is at fault."""
    named = key[:200].encode("utf-8", "backslashreplace").decode()  # JSON can name halves of characters
    return AdapterRejected(message, remedy=REMEDIES[cause], metadata={"cause": cause.value, "key": named})
