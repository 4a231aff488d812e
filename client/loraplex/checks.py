"""What a caller gives to the client, checked before anything is sent."""

import math

from loraplex.errors import InvalidRequest

MAX_TIMEOUT_S = 1e7  # about 115 days; gRPC turns what is beyond its clock into a deadline that has passed


def check_text(text: str, field: str) -> str:
    """`text`, which UTF-8 can hold. InvalidRequest, naming `field`, for a byte of another encoding, as shells allow."""
    try:
        text.encode()
    except (UnicodeEncodeError, AttributeError) as error:
        raise InvalidRequest(
            f"{field} is no text that can be sent: {text!a}.", remedy="Write it in UTF-8.", field=field
        ) from error
    return text


def check_timeout(timeout_s: float) -> float:
    """`timeout_s`, a number of seconds that a call can be given. InvalidRequest for any other."""
    if not (isinstance(timeout_s, int | float) and math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise InvalidRequest(
            f"timeout_s is {timeout_s}.",
            remedy=f"Use seconds above 0 and up to {MAX_TIMEOUT_S:.0f}.",
            field="timeout_s",
        )
    return timeout_s
