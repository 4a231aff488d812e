"""Every error that a caller can see: a code, a reason, a message and a remedy.

Services raise these; `status.py` turns them into gRPC status and back, so a client catches the class that the service
raised. No gRPC here.
"""

from typing import ClassVar, Literal

Code = Literal[
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "UNAVAILABLE",
    "INTERNAL",
]


class ServiceError(Exception):
    """An error with a code (a gRPC status name), a reason (UPPER_SNAKE, stable), a message and a remedy.

    `metadata` holds further facts as strings; `field` names the wrong field of the request; `retry_after_s` says when
    it is worth to try again.
    """

    code: ClassVar[Code] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})

    def __str__(self) -> str:
        return f"{self.message} Remedy: {self.remedy}" if self.remedy else self.message


class InvalidRequest(ServiceError):
    """A field of the request is wrong; `field` names it."""

    code, reason = "INVALID_ARGUMENT", "INVALID_REQUEST"


class UnknownLayout(ServiceError):
    """The store does not know this layout digest; register the layout, then ask again."""

    code, reason = "FAILED_PRECONDITION", "UNKNOWN_LAYOUT"


class InvalidAdapterRef(ServiceError):
    """The adapter reference cannot be read, or leaves the folders that the operator allowed."""

    code, reason = "INVALID_ARGUMENT", "INVALID_ADAPTER_REF"


class AdapterNotFound(ServiceError):
    """No such repository, revision or file."""

    code, reason = "NOT_FOUND", "ADAPTER_NOT_FOUND"


class AmbiguousAdapter(ServiceError):
    """The repository or folder holds several files and the reference names none; the message lists them."""

    code, reason = "INVALID_ARGUMENT", "AMBIGUOUS_ADAPTER"


class AdapterAccessDenied(ServiceError):
    """The repository is private or gated, and the store's token may not read it."""

    code, reason = "PERMISSION_DENIED", "ADAPTER_ACCESS_DENIED"


class AdapterRejected(ServiceError):
    """The file cannot be applied exactly. `cause` says why (UPPER_SNAKE), `key` is the first bad key of the file."""

    code, reason = "FAILED_PRECONDITION", "ADAPTER_REJECTED"

    @property
    def cause(self) -> str:
        """Why, for example NOT_FINITE."""
        return self.metadata.get("cause", "")

    @property
    def key(self) -> str:
        """The first bad key of the file; empty when the whole file is at fault."""
        return self.metadata.get("key", "")


class SourceUnavailable(ServiceError):
    """The hub cannot be reached, is too slow, or broke off."""

    code, reason = "UNAVAILABLE", "SOURCE_UNAVAILABLE"


class StoreUnavailable(ServiceError):
    """The executor cannot reach its adapter store, or the store broke off."""

    code, reason = "UNAVAILABLE", "STORE_UNAVAILABLE"


class StorageExhausted(ServiceError):
    """The store's disk or cache limit leaves no room for this adapter."""

    code, reason = "RESOURCE_EXHAUSTED", "STORAGE_EXHAUSTED"


class CorruptAdapter(ServiceError):
    """Packed bytes do not have the size, layout or sha256 that their header promised."""

    code, reason = "UNAVAILABLE", "CORRUPT_ADAPTER"


class TooManyRows(ServiceError):
    """The ranks of the request's adapters add up to more than one sample can select."""

    code, reason = "INVALID_ARGUMENT", "TOO_MANY_ROWS"


class NonFiniteOutput(ServiceError):
    """The model's numbers became infinite or NaN on the way to an image, so there is none."""

    code, reason = "FAILED_PRECONDITION", "NON_FINITE_OUTPUT"


class QueueFull(ServiceError):
    """The executor has as many unfinished requests as it admits; `retry_after_s` says when to come back."""

    code, reason = "RESOURCE_EXHAUSTED", "QUEUE_FULL"


class ShuttingDown(ServiceError):
    """The service is draining and takes no new work."""

    code, reason = "UNAVAILABLE", "SHUTTING_DOWN"


class DeadlineExceeded(ServiceError):
    """The request's deadline passed before it was done."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class Cancelled(ServiceError):
    """The caller cancelled the request."""

    code, reason = "CANCELLED", "CANCELLED"


class ServiceUnavailable(ServiceError):
    """The service cannot be reached."""

    code, reason = "UNAVAILABLE", "SERVICE_UNAVAILABLE"


class InternalError(ServiceError):
    """A fault of the service; its log has the details under the request id."""

    code, reason = "INTERNAL", "INTERNAL"


ERRORS_BY_REASON: dict[str, type[ServiceError]] = {error.reason: error for error in ServiceError.__subclasses__()}
