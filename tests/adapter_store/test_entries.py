"""What the cache keeps of a packed adapter, as a text."""

import pytest

from adapter_store.entries import MAX_REFS, Entry, KnownRef


def entry(name: str, last_used_s: float, size_bytes: int = 10) -> Entry:
    return Entry(name, f"digest-{name}", size_bytes, 4, (0, 2), "layout", last_used_s)


def test_an_entry_survives_being_written_and_read():
    known = entry("a", 1).used(5, KnownRef("org/name", "a.safetensors", False))
    assert Entry.from_json(known.to_json()) == known
    assert "\n" not in repr(known)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"refs": 3}', '{"key": 1, "refs": []}'])
def test_what_is_no_entry_is_not_read(text: str):
    with pytest.raises(ValueError):
        Entry.from_json(text)


def test_only_the_latest_references_are_kept():
    known = entry("a", 1)
    for number in range(3 * MAX_REFS):
        known = known.used(number, KnownRef(f"org/{number}", "a", False))
    assert len(known.refs) == MAX_REFS
    assert known.refs[0].ref == f"org/{3 * MAX_REFS - 1}"
    assert known.used(99, known.refs[3]).refs[0] == known.refs[3]
