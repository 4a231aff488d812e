"""The books of the cache: which packed adapters there are, their bytes, and the order of their use. No I/O.

A packed file has one digest, and may have several keys.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator

from adapter_store.entries import Entry


class Ledger:
    """Entries by key, and digests in the order of their last use. Every operation but `reset` and `victims` is O(1)."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.reset(entries)

    def __repr__(self) -> str:
        return f"<Ledger {len(self._entries)} entries, {self.size_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def reset(self, entries: Iterable[Entry]) -> None:
        """Start again with these."""
        self._entries: dict[str, Entry] = {}
        self._keys: OrderedDict[str, set[str]] = OrderedDict()  # digest -> keys, the least recently used first
        self._sizes: dict[str, int] = {}
        self.size_bytes = 0
        for entry in sorted(entries, key=lambda entry: entry.last_used_s):
            self.put(entry)

    def put(self, entry: Entry) -> None:
        """Add or replace an entry; it is now the most recently used."""
        before = self._entries.get(entry.key)
        if before is not None and before.digest != entry.digest:
            self._forget_key(before)
        self._entries[entry.key] = entry
        if entry.digest not in self._keys:
            self._keys[entry.digest], self._sizes[entry.digest] = set(), entry.size_bytes
            self.size_bytes += entry.size_bytes
        self._keys[entry.digest].add(entry.key)
        self._keys.move_to_end(entry.digest)

    def drop(self, digest: str) -> list[Entry]:
        """Remove a digest; returns its entries."""
        dropped = [self._entries[key] for key in self._keys.get(digest, ())]
        for entry in dropped:
            self._forget_key(entry)
        return dropped

    def get(self, key: str) -> Entry | None:
        """The entry of a key."""
        return self._entries.get(key)

    def of_digest(self, digest: str) -> list[Entry]:
        """The entries of a digest, none when it is not there."""
        return [self._entries[key] for key in self._keys.get(digest, ())]

    def victims(self, over_bytes: int, pinned: Container[str], is_stale: Callable[[str], bool]) -> list[str]:
        """The least recently used digests that together free `over_bytes`, none of them pinned.

        Fewer than that when the rest is pinned: compare the sum of `size_of`. `is_stale` is asked about each before it
        is chosen, and says whether it was used meanwhile without the ledger knowing: then it is passed over at first.
        """
        if over_bytes <= 0:
            return []
        chosen: list[str] = []
        passed_over: list[str] = []
        for digests, may_be_stale in ((list(self._keys), True), (passed_over, False)):
            for digest in digests:
                if over_bytes <= 0:
                    return chosen
                if digest in pinned:
                    continue
                if may_be_stale and is_stale(digest):
                    passed_over.append(digest)
                    continue
                chosen.append(digest)
                over_bytes -= self._sizes[digest]
        return chosen

    def size_of(self, digest: str) -> int:
        """The bytes of a digest's file, 0 when it is not there."""
        return self._sizes.get(digest, 0)

    def check(self) -> None:
        """For tests: the books agree with one another."""
        keys = {key for of_digest in self._keys.values() for key in of_digest}
        assert keys == set(self._entries), "keys and entries differ"
        assert all(self._entries[k].digest == d for d, of_digest in self._keys.items() for k in of_digest)
        assert set(self._sizes) == set(self._keys), "sizes and digests differ"
        assert self.size_bytes == sum(self._sizes.values()), "the sum is wrong"

    def _forget_key(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._keys[entry.digest].discard(entry.key)
        if not self._keys[entry.digest]:
            del self._keys[entry.digest]
            self.size_bytes -= self._sizes.pop(entry.digest)
