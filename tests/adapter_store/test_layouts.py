"""Registered layouts on the disk: kept, written again when they were damaged, and never trusted when they are."""

import shutil
from pathlib import Path

import pytest

from adapter_store.layouts import Layouts
from loraplex.errors import UnknownLayout
from tests.adapter_store.samples import flux_layout

LAYOUT = flux_layout()


def test_a_layout_is_found_by_another_store_on_the_folder(tmp_path: Path):
    assert Layouts(tmp_path).register(LAYOUT.to_proto()) == LAYOUT
    assert Layouts(tmp_path).get(LAYOUT.digest) == LAYOUT
    assert Layouts(tmp_path).all() == [LAYOUT]


@pytest.mark.parametrize("damage", [b"", b"\xff\xff", flux_layout("BF16").to_proto().SerializeToString()])
def test_a_damaged_layout_is_unknown_until_it_is_registered_again(tmp_path: Path, damage: bytes):
    layouts = Layouts(tmp_path)
    layouts.register(LAYOUT.to_proto())
    (tmp_path / f"{LAYOUT.digest}.binpb").write_bytes(damage)
    with pytest.raises(UnknownLayout):
        Layouts(tmp_path).get(LAYOUT.digest)
    layouts.register(LAYOUT.to_proto())
    assert Layouts(tmp_path).get(LAYOUT.digest) == LAYOUT


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path):
    layouts = Layouts(tmp_path / "layouts")
    layouts.register(LAYOUT.to_proto())
    shutil.rmtree(tmp_path / "layouts")
    assert layouts.all() == []
    layouts.register(LAYOUT.to_proto())
    assert [path.name for path in (tmp_path / "layouts").iterdir()] == [f"{LAYOUT.digest}.binpb"]
