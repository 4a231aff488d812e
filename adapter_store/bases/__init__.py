"""Layouts of base models without their weights: of the well-known ones, of a local folder, of a hub repository.

`bases.json` names the well-known ones, `components/` holds their configs, `SOURCES.md` says where the numbers come
from; `outlines/` are the target modules that diffusers builds from these, so that knowing a base needs no torch.
"""

from adapter_store.bases.catalogue import find_base, known_bases, known_layout, known_layouts

__all__ = ["find_base", "known_bases", "known_layout", "known_layouts"]
