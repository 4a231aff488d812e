"""Around every call: request id, gate, metrics, one log line, and errors turned into gRPC status."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_status import rpc_status

from loraplex.errors import InternalError, InvalidRequest, ServiceError
from loraplex.serving.gate import Gate
from loraplex.serving.metrics import HANDLED, SECONDS, STARTED
from loraplex.serving.request_ids import accept_request_id, request_id
from loraplex.status import to_status

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

# The client ends a call at its deadline too, and what it sends may arrive just before ours.
_SAME_MOMENT_S = 0.05

_log = structlog.stdlib.get_logger("loraplex.call")


class CallInterceptor(aio.ServerInterceptor):
    """Watches every call of a server, and is the one place where an exception becomes a status.

    Calls of gRPC's own services (health, reflection) pass the gate at any time and are logged at level debug.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> "Handler | None":
        """The handler of the same kind that runs the original one inside `_watched`."""
        handler = await continuation(details)
        if handler is None:
            return None
        call = _Call.of(details.method, handler)
        return _wrapped(handler, lambda behaviour, read: self._around(call, behaviour, read))

    def _around(self, call: "_Call", behaviour: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
        async def answer(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            async with self._watched(call, context):
                return await behaviour(read(request), context)

        async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            async with self._watched(call, context), aclosing(behaviour(read(request), context)) as responses:
                async for response in responses:
                    yield response

        # A response stream may also be a coroutine that writes to the context, as gRPC's own health service does.
        return stream if inspect.isasyncgenfunction(behaviour) else answer

    @asynccontextmanager
    async def _watched(self, call: "_Call", context: aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        structlog.contextvars.bind_contextvars(request_id=accept_request_id(context.invocation_metadata() or ()))
        STARTED.labels(*call.labels).inc()
        began = time.perf_counter()
        code, reason = "OK", ""
        place: AbstractContextManager[None] = nullcontext() if call.is_grpcs_own else self._gate.entered()
        try:
            with place:
                yield
        except (asyncio.CancelledError, GeneratorExit):
            left_s = context.time_remaining()
            code = "CANCELLED" if left_s is None or left_s > _SAME_MOMENT_S else "DEADLINE_EXCEEDED"
            raise
        except aio.AbortError:
            code = _code_name(context)
            raise
        except ServiceError as error:
            code, reason = error.code, error.reason
            await _abort(context, error)
        except Exception:  # noqa: BLE001 - the boundary of a call; what it caught is logged and answered without its text
            code, reason = InternalError.code, InternalError.reason
            _log.exception("call failed", method=call.method)
            await _abort(context, InternalError("The service failed.", remedy="Its log has the details."))
        finally:
            call.report(code, reason, time.perf_counter() - began)


@dataclass(frozen=True)
class _Call:
    method: str
    labels: tuple[str, str, str]  # grpc_type, grpc_service, grpc_method

    @classmethod
    def of(cls, method: str, handler: Handler) -> "_Call":
        service, _, name = method.lstrip("/").partition("/")
        kinds = {
            (False, False): "unary",
            (False, True): "server_stream",
            (True, False): "client_stream",
            (True, True): "bidi_stream",
        }
        kind = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
        return cls(method=f"{service}/{name}", labels=(kind, service, name))

    @property
    def is_grpcs_own(self) -> bool:
        return self.labels[1].startswith("grpc.")

    def report(self, code: str, reason: str, seconds: float) -> None:
        HANDLED.labels(*self.labels, code).inc()
        SECONDS.labels(*self.labels).observe(seconds)
        log = _log.debug if self.is_grpcs_own else _log.info
        why = {"reason": reason} if reason else {}
        log("call", method=self.method, code=code, **why, seconds=round(seconds, 4))


async def _abort(context: aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    status = to_status(error, request_id=request_id())
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")


def _code_name(context: aio.ServicerContext[Any, Any]) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"


def _wrapped(
    handler: Handler, around: Callable[[Callable[..., Any], Callable[[Any], Any]], Callable[..., Any]]
) -> Handler:
    # The kind must stay the same; the server calls the attribute that its two streaming flags say.
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    for kind in kinds:
        behaviour = getattr(handler, kind)
        if behaviour is not None:
            make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
            if handler.request_streaming:
                return make(around(behaviour, _as_it_is), handler.request_deserializer, handler.response_serializer)
            # Read inside, where what cannot be read gets a status and no traceback of gRPC's own.
            read = _reading(handler.request_deserializer)
            return make(around(behaviour, read), None, handler.response_serializer)
    return handler


def _as_it_is(request: Any) -> Any:
    return request


def _reading(deserialize: Callable[[bytes], Any] | None) -> Callable[[Any], Any]:
    def read(request: bytes) -> Any:
        try:
            return deserialize(request) if deserialize else request
        except DecodeError as error:
            raise InvalidRequest(
                "The request is no message of this method.",
                remedy="Generate the stubs from the protos of this version.",
            ) from error

    return read
