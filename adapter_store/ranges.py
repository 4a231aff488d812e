"""An answer of a web server to a ranged GET -> the file from some byte on, or the error that it means."""

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from adapter_store.transfer import Body, WrongBytes

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Response(Protocol):
    """As much of an answer of httpx, of any release, as is read here."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]:
        """By name, in any case."""

    def iter_raw(self) -> Iterator[bytes]:
        """The body as it arrives."""


def range_headers(start: int, validator: str = "") -> dict[str, str]:
    """The headers that ask for a file from `start` on, if it is still the one of `validator`; else for all of it."""
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if validator:
            headers["If-Range"] = validator
    return headers


def body_of(response: Response, start: int, chunks: Iterator[bytes]) -> Body:
    """The body of a successful answer, or of 416. Raises WrongBytes when it is not what was asked for."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise WrongBytes("The source sends the file compressed, against the request.", remedy=_REMEDY)
    if response.status_code == 416:
        raise WrongBytes(f"The source has no byte {start}, and stated more before.", remedy=_REMEDY)
    if response.status_code != 206:
        return Body(0, size_of(response), chunks)
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if match is None or int(match[1]) != start:
        raise WrongBytes("The source answered with another range than it was asked for.", remedy=_REMEDY)
    return Body(start, size_of(response), chunks)


def size_of(response: Response) -> int | None:
    """The size of the whole file, None where the answer does not state it."""
    if response.status_code == 416:
        return None
    if response.status_code == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        return int(match[3]) if match and match[3] != "*" else None
    length = response.headers.get("content-length", "")
    return int(length) if re.fullmatch(r"\d{1,18}", length) else None


_REMEDY = "Try again; if it stays so, the source is broken: use another one."
