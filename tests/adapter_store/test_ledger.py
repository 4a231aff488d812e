"""What is evicted, decided without a disk."""

import random

import pytest

from adapter_store.entries import Entry
from adapter_store.ledger import Ledger


def entry(key: str, last_used_s: float = 0.0, digest: str = "", size_bytes: int = 10) -> Entry:
    return Entry(key, digest or f"digest-{key}", size_bytes, 4, (0, 2), "layout", last_used_s)


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
    chosen = Ledger(ENTRIES).victims(over_bytes, pinned, lambda _: False)
    assert chosen == [f"digest-{name}" for name in victims]


def test_what_was_used_elsewhere_is_passed_over_while_others_suffice():
    ledger = Ledger(ENTRIES)
    assert ledger.victims(10, (), lambda digest: digest == "digest-old") == ["digest-middle"]
    assert ledger.victims(30, (), lambda digest: digest == "digest-old")[-1] == "digest-old"


def test_a_use_moves_an_entry_to_the_end():
    ledger = Ledger(ENTRIES)
    ledger.put(ENTRIES[1].used(9, None))
    assert ledger.victims(20, (), lambda _: False) == ["digest-middle", "digest-new"]


def test_a_digest_under_two_keys_counts_once_and_goes_whole():
    ledger = Ledger([entry("a", digest="d"), entry("b", digest="d"), entry("c")])
    assert ledger.size_bytes == 20
    assert {one.key for one in ledger.drop("d")} == {"a", "b"}
    assert (len(ledger), ledger.size_bytes, ledger.drop("d")) == (1, 10, [])


def test_the_books_agree_after_any_sequence_of_operations():
    choose, ledger = random.Random(7), Ledger()
    for step in range(3000):
        key, digest = f"k{choose.randrange(30)}", f"d{choose.randrange(20)}"
        if choose.random() < 0.7:
            ledger.put(entry(key, step, digest, size_bytes=int(digest[1:]) + 1))
        else:
            ledger.drop(digest)
        ledger.check()
    assert "\n" not in repr(ledger)
