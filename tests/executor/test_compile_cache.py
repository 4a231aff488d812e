"""What is kept between two starts, and that nothing else is ever used. The compiler is played by the tests."""

import json
import os
from pathlib import Path

import pytest

from executor.compile_cache import compile_cache

FACTS = {"torch": "2.13", "layout": "abc"}


def compiled(folder: Path, facts: dict[str, str] = FACTS) -> dict[str, bytes]:
    """One start: what lay in torch's cache at its beginning; afterwards it holds one library."""
    with compile_cache(folder, facts):
        work = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        found = {str(path.relative_to(work)): path.read_bytes() for path in work.rglob("*") if path.is_file()}
        library = work / "ab" / "kernel.so"
        library.parent.mkdir(exist_ok=True)
        library.write_bytes(b"machine code of " + facts["torch"].encode())
        library.chmod(0o755)
    assert not work.exists()
    return found


def kept_file(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(name)
    return path


def test_the_second_start_finds_what_the_first_compiled(tmp_path: Path) -> None:
    assert compiled(tmp_path) == {}
    assert compiled(tmp_path) == {"ab/kernel.so": b"machine code of 2.13"}
    assert kept_file(tmp_path, "kernel.so").stat().st_mode & 0o111


def test_other_versions_or_shapes_find_nothing(tmp_path: Path) -> None:
    compiled(tmp_path)
    assert compiled(tmp_path, {**FACTS, "torch": "2.14"}) == {}
    assert compiled(tmp_path, {**FACTS, "layout": "abd"}) == {}
    assert compiled(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"machine code of 2.12", None])
def test_a_file_that_is_not_as_it_was_kept_is_never_used_and_replaced(tmp_path: Path, damage: bytes | None) -> None:
    compiled(tmp_path)
    library = kept_file(tmp_path, "kernel.so")
    library.unlink() if damage is None else library.write_bytes(damage)
    assert compiled(tmp_path) == {}
    assert compiled(tmp_path) == {"ab/kernel.so": b"machine code of 2.13"}


@pytest.mark.parametrize("text", ["", "[]", "no json", '{"../../etc/passwd": "0"}', '{"ab/kernel.so": "0"}'])
def test_a_damaged_manifest_is_no_reason_to_fail(tmp_path: Path, text: str) -> None:
    compiled(tmp_path)
    kept_file(tmp_path, "manifest.json").write_text(text)
    assert compiled(tmp_path) == {}


def test_a_start_that_fails_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), compile_cache(tmp_path, FACTS):
        work = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        (work / "half.so").write_bytes(b"")
        raise RuntimeError("killed while it compiled")
    assert not work.exists()
    assert compiled(tmp_path) == {}


def test_the_environment_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    compiled(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"
    with compile_cache(None, FACTS):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"


def test_only_the_latest_few_are_kept(tmp_path: Path) -> None:
    for version in range(6):
        compiled(tmp_path, {"torch": str(version)})
        os.utime(kept_file(tmp_path, "manifest.json").parent if version == 0 else tmp_path)
    assert len(list(tmp_path.rglob("manifest.json"))) == 4
    assert compiled(tmp_path, {"torch": "5"})


def test_a_folder_that_cannot_be_written_costs_time_and_no_more(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert compiled(blocked / "cache") == {}
    assert compiled(blocked / "cache") == {}


def test_two_starts_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    with compile_cache(tmp_path, FACTS):
        assert compiled(tmp_path) == {}
    manifest = json.loads(kept_file(tmp_path, "manifest.json").read_text())
    assert list(manifest) == ["ab/kernel.so"]
