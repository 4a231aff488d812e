"""ServiceError to gRPC status and back."""

import grpc
import pytest
from google.rpc import status_pb2
from grpc.aio import AioRpcError, Metadata

from loraplex.errors import (
    ERRORS_BY_REASON,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    ServiceError,
    ServiceUnavailable,
)
from loraplex.status import DETAILS_KEY, from_rpc_error, from_status, to_status


def _all_errors() -> list[type[ServiceError]]:
    found: list[type[ServiceError]] = []
    pending = [ServiceError]
    while pending:
        pending += (children := pending.pop().__subclasses__())
        found += [child for child in children if child.__module__ == "loraplex.errors"]
    return found


@pytest.mark.parametrize("error_class", _all_errors(), ids=lambda error: error.reason)
def test_every_error_comes_back_as_the_class_that_was_raised(error_class: type[ServiceError]):
    sent = error_class(
        "What happened: ä.", remedy="Do this.", field="seed", retry_after_s=1.25, metadata={"key": "lora_A"}
    )
    back = from_status(to_status(sent))
    assert type(back) is error_class
    assert vars(back) == vars(sent)


def test_every_code_is_one_of_grpcs():
    assert {error.code for error in _all_errors()} <= set(grpc.StatusCode.__members__)


def test_every_reason_names_one_class():
    assert len(ERRORS_BY_REASON) == len(_all_errors())


def test_what_was_not_said_comes_back_unsaid():
    back = from_status(to_status(QueueFull("Full.")))
    assert vars(back) == vars(QueueFull("Full."))


def test_the_request_id_travels_in_the_metadata():
    back = from_status(to_status(InvalidRequest("No."), request_id="abc"))
    assert back is not None
    assert back.metadata == {"request_id": "abc"}


def test_long_texts_are_shortened_so_that_the_trailer_stays_below_eight_kilobytes():
    long = "ä" * 10_000
    status = to_status(InvalidRequest(long, remedy=long, field="prompt", metadata={"a": long, "key": long}))
    assert 4 * len(status.SerializeToString()) / 3 + 3 * len(status.message.encode()) < 8192
    assert status.message.endswith("…")


def test_a_reason_of_a_newer_service_is_kept():
    status = to_status(InvalidRequest("New."))
    status.details[0].value = status.details[0].value.replace(b"INVALID_REQUEST", b"FROM_THE_FUTURE")
    back = from_status(status)
    assert isinstance(back, InternalError)
    assert back.metadata["reason"] == "FROM_THE_FUTURE"


def test_a_status_of_another_domain_is_not_ours():
    assert from_status(status_pb2.Status(code=3, message="Somebody else's.")) is None


def _grpc_failure(code: grpc.StatusCode, details: str = "", trailer: tuple[tuple[str, bytes], ...] = ()) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailer), details)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, ServiceUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.UNIMPLEMENTED, InternalError),
        (grpc.StatusCode.UNKNOWN, InternalError),
    ],
)
def test_a_failure_of_grpc_itself_names_the_target(code: grpc.StatusCode, expected: type[ServiceError]):
    error = from_rpc_error(_grpc_failure(code, "some detail"), "host:1")
    assert type(error) is expected
    assert "host:1" in error.message


def test_a_message_too_large_for_grpc_is_the_callers_mistake():
    details = "CLIENT: Received message larger than max (9 vs. 4)"
    error = from_rpc_error(_grpc_failure(grpc.StatusCode.RESOURCE_EXHAUSTED, details), "host:1")
    assert type(error) is InvalidRequest
    assert (bool(error.remedy), "9 vs. 4" in error.message) == (True, True)
    other = from_rpc_error(_grpc_failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota"), "host:1")
    assert type(other) is InternalError


def test_a_failure_with_details_is_the_services_own():
    trailer = ((DETAILS_KEY, to_status(QueueFull("Full.", retry_after_s=2)).SerializeToString()),)
    error = from_rpc_error(_grpc_failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "Full.", trailer), "host:1")
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 2


def test_broken_details_do_not_hide_the_failure():
    error = from_rpc_error(_grpc_failure(grpc.StatusCode.UNAVAILABLE, "", ((DETAILS_KEY, b"\xff"),)), "host:1")
    assert isinstance(error, ServiceUnavailable)
