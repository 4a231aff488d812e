"""`python -m adapter_store.bases`: write the outlines of the well-known bases anew from their configs."""

import sys

from adapter_store.bases.catalogue import OUTLINES, component_configs
from adapter_store.bases.outline import write_outline


def main() -> None:
    """Write one outline per config; needs torch and diffusers."""
    from adapter_store.bases.build import build_component

    for name, config in component_configs().items():
        path = OUTLINES / f"{name}.txt"
        path.write_text(write_outline(build_component("", config)))
        sys.stdout.write(f"{path.name}\n")


if __name__ == "__main__":
    main()
