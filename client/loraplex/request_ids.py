"""Request ids: what one looks like and the header that carries it."""

import re
import uuid

HEADER = "x-request-id"

# An id ends in log lines of every service, so it is short and plain.
_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def new_request_id() -> str:
    """A request id that nobody else has."""
    return uuid.uuid4().hex


def is_request_id(text: str) -> bool:
    """Whether `text` is 1 to 128 letters, digits, or `._:/+=@-`."""
    return _PLAIN.fullmatch(text) is not None
