"""What is evicted, decided without a disk."""

import pytest

from adapter_store.entries import MAX_REFS, Entry, KnownRef, choose_victims


def entry(name: str, last_used_s: float, size_bytes: int = 10) -> Entry:
    return Entry(name, f"digest-{name}", size_bytes, 4, (0, 2), "layout", last_used_s)


ENTRIES = [entry("new", 3), entry("old", 1), entry("middle", 2)]


@pytest.mark.parametrize(
    ("over_bytes", "pinned", "victims"),
    [
        (0, set(), []),
        (-5, set(), []),
        (1, set(), ["old"]),
        (10, set(), ["old"]),
        (11, set(), ["old", "middle"]),
        (1, {"digest-old"}, ["middle"]),
        (99, {"digest-old"}, ["middle", "new"]),
    ],
)
def test_the_least_recently_used_go_first_and_pinned_ones_never(over_bytes: int, pinned: set[str], victims: list[str]):
    assert [one.key for one in choose_victims(ENTRIES, over_bytes, pinned)] == victims


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
