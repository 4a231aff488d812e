"""The environment that a process needs from its start on, to be measured."""

import os
import sys

# One thread; malloc as deploy/local.py sets it for the services; nothing that libraries would print between tables.
_MEASURING = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "LORAPLEX_STORE_LOG_LEVEL": "warning",
    "LORAPLEX_EXECUTOR_LOG_LEVEL": "warning",
}


def settle() -> None:
    """Start this process again with the right environment, unless it has it. Call it before torch is imported."""
    if any(os.environ.get(name) != value for name, value in _MEASURING.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **_MEASURING})
