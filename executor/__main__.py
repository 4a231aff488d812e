"""`python -m executor`: serve one base model."""

import os
import sys
from typing import NoReturn

PROG = "python -m executor"
_EXIT_INTERRUPTED = 130


def main() -> int:
    """Run the executor with the settings of the command line; returns the exit status."""
    try:
        from executor.config import ExecutorSettings
        from loraplex.serving import load_settings, run

        settings = load_settings(ExecutorSettings, sys.argv[1:], PROG)
        from executor.service import ExecutorService  # only now: torch and diffusers take seconds, --help needs none
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{PROG}: {error}. It needs more than a client does: pip install 'loraplex[executor]'"
        ) from error
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return run(ExecutorService(settings), settings)


def leave(status: int) -> NoReturn:
    """End the process as it is, all that must be closed being closed.

    Python's own clean-up takes a compiled model apart object by object, which takes seconds and does nothing; and it
    would wait for a compilation, which nothing can interrupt.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
