"""The id of the request that a task works for: it arrives as a header or is made up, and is sent on with every call."""

from collections.abc import Iterable
from contextvars import ContextVar

from loraplex.request_ids import HEADER, is_request_id, new_request_id

_current: ContextVar[str] = ContextVar("loraplex_request_id", default="")


def request_id() -> str:
    """The id of the request that this task works for; empty outside of a request."""
    return _current.get()


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """The metadata to send with a call to the next service, so that the id travels on."""
    current = _current.get()
    return ((HEADER, current),) if current else ()


def accept_request_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Take the request id from a call's metadata, or make one up, for the rest of this task."""
    sent = next((value for key, value in metadata if key == HEADER), "")
    accepted = sent if isinstance(sent, str) and is_request_id(sent) else new_request_id()
    _current.set(accepted)
    return accepted
