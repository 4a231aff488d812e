"""What becomes of every tensor of a file: it is applied, or changes nothing, or is left out as the caller allowed."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Accounting:
    """The keys of a file by what becomes of them, each in one place only."""

    applied: tuple[str, ...]
    zero: tuple[str, ...]
    waived: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Accounting {len(self.applied)} applied, {len(self.zero)} zero, {len(self.waived)} waived>"

    @classmethod
    def of(
        cls, tensors: Collection[str], applied: Iterable[str], zero: Iterable[str], waived: Iterable[str]
    ) -> "Accounting":
        """The account of all `tensors`, in their order. A key that two differences share, an alpha, is applied.

        Raises RuntimeError when a tensor has no place, or a place has no tensor: a fault of the converter, which must
        refuse what it cannot place.
        """
        places = dict.fromkeys(waived, "waived") | dict.fromkeys(zero, "zero") | dict.fromkeys(applied, "applied")
        if places.keys() != set(tensors):
            raise RuntimeError(f"{len(places.keys() ^ set(tensors))} tensors are not accounted for")
        by_place = {place: tuple(key for key in tensors if places[key] == place) for place in set(places.values())}
        return cls(*(by_place.get(place, ()) for place in ("applied", "zero", "waived")))
