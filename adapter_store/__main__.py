"""`python -m adapter_store`: serve; with a command such as `inspect` or `pack`, the tools of `cli`."""

import ctypes
import logging
import platform
import sys
from collections.abc import Sequence

import structlog

from adapter_store.config import StoreSettings
from adapter_store.service import AdapterStoreService
from loraplex.serving import load_settings, run

PROG = "python -m adapter_store"
# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# Some versions of glibc refuse more than 32 MiB as M_MMAP_THRESHOLD, in silence; the largest block here has 8 MiB.
_MALLOPT = {_M_TRIM_THRESHOLD: 256 << 20, _M_TOP_PAD: 64 << 20, _M_MMAP_THRESHOLD: 32 << 20}


def main(argv: Sequence[str]) -> int:
    """Serve until a signal, or run a command; returns the exit status."""
    if argv and not argv[0].startswith("-"):
        from adapter_store.cli import app  # a server needs none of it

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # these commands print
        app(args=list(argv), prog_name=PROG)
    settings = load_settings(StoreSettings, argv, prog=PROG)
    keep_freed_memory()
    return run(AdapterStoreService(settings), settings)


def keep_freed_memory() -> None:
    """Let glibc reuse the megabytes of a chunk instead of giving them back to the kernel for every one.

    With protobuf chunks this made streams 2 to 3 times faster. Does nothing on other C libraries.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, size_bytes in _MALLOPT.items():
        mallopt(parameter, size_bytes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
