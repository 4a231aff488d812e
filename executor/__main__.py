"""`python -m executor`: serve one base model."""

import sys

from executor.config import ExecutorSettings
from loraplex.serving import load_settings, run


def main() -> int:
    """Run the executor with the settings of the command line; returns the exit status."""
    settings = load_settings(ExecutorSettings, sys.argv[1:], "python -m executor")
    from executor.service import ExecutorService  # only now: torch and diffusers take seconds, and --help needs none

    return run(ExecutorService(settings), settings)


if __name__ == "__main__":
    raise SystemExit(main())
