"""ServiceError to gRPC status and back, so that a client catches the class that the service raised.

A status carries google.rpc.ErrorInfo (reason, domain "loraplex", metadata with the remedy), BadRequest for a wrong
field, and RetryInfo for `retry_after_s`. A failure without ErrorInfo of our domain comes from gRPC itself, and becomes
ServiceUnavailable, DeadlineExceeded, Cancelled, InvalidRequest (a message too large to be sent) or InternalError.
"""

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from loraplex.errors import (
    ERRORS_BY_REASON,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ServiceError,
    ServiceUnavailable,
)

DOMAIN = "loraplex"
REMEDY = "remedy"
REQUEST_ID = "request_id"
DETAILS_KEY = "grpc-status-details-bin"

# The whole trailer must stay below 8 KiB, beyond which receivers start to drop it together with the reason.
_MESSAGE_BYTES = 1024
_METADATA_BYTES = 512


def to_status(error: ServiceError, *, request_id: str = "") -> status_pb2.Status:
    """The rich status of `error`, with the request's id in its metadata. Texts too long for a trailer are shortened."""
    message = _shortened(error.message, _MESSAGE_BYTES)
    ours = {REMEDY: error.remedy, REQUEST_ID: request_id}
    metadata = {**error.metadata, **{key: value for key, value in ours.items() if value}}
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=DOMAIN,
            metadata={key: _shortened(value, _METADATA_BYTES) for key, value in metadata.items()},
        )
    )
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status) -> ServiceError | None:
    """The error that a rich status stands for; None when it names no reason of ours.

    A reason of a newer service becomes an InternalError that keeps it in its metadata under "reason".
    """
    error_info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for packed in status.details:
        for detail in (error_info, bad_request, retry):
            packed.Unpack(detail)  # does nothing unless the type is the same
    if error_info.domain != DOMAIN:
        return None
    metadata = dict(error_info.metadata)
    remedy = metadata.pop(REMEDY, "")
    if error_info.reason not in ERRORS_BY_REASON:
        metadata["reason"] = error_info.reason
    return ERRORS_BY_REASON.get(error_info.reason, InternalError)(
        status.message,
        remedy=remedy,
        field=bad_request.field_violations[0].field if bad_request.field_violations else "",
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        metadata=metadata,
    )


def from_rpc_error(error: grpc.RpcError, target: str) -> ServiceError:
    """The error behind a failed call to `target`, for sync and aio calls; what gRPC itself reports names the target."""
    status = _rich_status(error)
    rich = from_status(status) if status else None
    return rich or _plain(error, target)


def _plain(error: grpc.RpcError, target: str) -> ServiceError:
    code, details = error.code(), error.details() or "no details"
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServiceUnavailable(
            f"{target} cannot be reached: {details}", remedy=f"Check that the service runs and listens on {target}."
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{target} did not answer in time.", remedy="Allow more time, or ask for less.")
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(f"The call to {target} was cancelled.")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidRequest(f"A message for or from {target} is too large: {details}", remedy="Send smaller images.")
    return InternalError(
        f"{target} answered {code.name}: {details}", remedy="Check that this address is the service that you mean."
    )


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    metadata = cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _shortened(text: str, limit: int) -> str:
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    return encoded[: limit - 3].decode(errors="ignore") + "…"
