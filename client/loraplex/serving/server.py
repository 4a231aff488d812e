"""The life of a service: bind, NOT_SERVING, start, SERVING, a signal, NOT_SERVING, drain, stop, close."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from loraplex.channel import SERVER_OPTIONS
from loraplex.errors import ServiceError
from loraplex.serving.addresses import why_not
from loraplex.serving.errors import CannotStart
from loraplex.serving.gate import Gate
from loraplex.serving.interceptor import CallInterceptor
from loraplex.serving.logs import configure_logs
from loraplex.serving.metrics import metrics_served
from loraplex.serving.settings import ServingSettings

_log = structlog.stdlib.get_logger("loraplex.serving")

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# Time for the last statuses to leave, and for watchers of health to be told, after the last call has ended.
_FLUSH_S = 0.5
_SECOND_SIGNAL_AFTER_S = 1.0


class Service(Protocol):
    """What a service brings; `run` and `serving` do the rest. All methods are called on the event loop."""

    name: str
    """What it is called in its log lines."""
    grpc_services: tuple[str, ...]
    """Full names of its gRPC services, for health and reflection."""

    def register(self, server: aio.Server) -> None:
        """Add the servicers. Their calls are let in only between `start` and `drain`."""

    async def start(self) -> None:
        """Get ready; when it returns, health turns SERVING. If it raises, the process ends with status 1.

        Of CannotStart, OSError and ServiceError the log shows the message alone, of others a traceback.
        """

    async def drain(self) -> None:
        """Finish what was admitted. No new call is let in; running calls go on meanwhile."""

    async def close(self) -> None:
        """Release everything. Called once in any case, also when `start` failed or was cancelled."""


def run(service: Service, settings: ServingSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status: 0 after a drain, 1 when the service could not start.

    A second signal, a second or more after the first, ends the process at once.
    """
    configure_logs(settings)
    structlog.contextvars.bind_contextvars(service=service.name)
    return asyncio.run(_until_signalled(service, settings))


@asynccontextmanager
async def serving(service: Service, settings: ServingSettings) -> AsyncIterator[str]:
    """Serve inside the block; yields the bound address, host:port, when the service has started.

    Leaving the block drains, for `drain_timeout_s` at most. What `start` raises comes out of entering it.
    """
    gate, servicer = Gate(), health.aio.HealthServicer()
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        metrics_address = stack.enter_context(metrics_served(settings.metrics_listen))
        stack.push_async_callback(service.close)
        server = await _server(service, gate, servicer)
        address = _bind(server, settings.listen)
        await server.start()
        stack.push_async_callback(server.stop, _FLUSH_S)
        _log.info("listening", address=address, metrics_address=metrics_address)
        await service.start()
        for name in ("", *service.grpc_services):
            await servicer.set(name, _SERVING)
        gate.open()
        _log.info("serving", address=address, seconds=round(time.perf_counter() - began, 2))
        try:
            yield address
        finally:
            await servicer.enter_graceful_shutdown()
            await _drain(service, gate, settings.drain_timeout_s)
    _log.info("stopped")


async def _server(service: Service, gate: Gate, servicer: health.aio.HealthServicer) -> aio.Server:
    for name in ("", *service.grpc_services):
        await servicer.set(name, _NOT_SERVING)
    server = aio.server(interceptors=[CallInterceptor(gate)], options=SERVER_OPTIONS)
    service.register(server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*service.grpc_services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _bind(server: aio.Server, listen: str) -> str:
    is_path = listen.startswith("unix:")
    # Asked of the system first: gRPC writes lines of its own about a port that it cannot have, and does not say why.
    why = "" if is_path else why_not(listen)
    if why:
        raise CannotStart(f"listen: {listen}: {why}")
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise CannotStart(f"listen: {listen}: {error}") from error
    return listen if is_path else f"{listen.rpartition(':')[0]}:{port}"


async def _drain(service: Service, gate: Gate, timeout_s: float) -> None:
    gate.drain()

    async def finish() -> None:
        await service.drain()
        await gate.empty()

    try:
        await asyncio.wait_for(finish(), timeout_s)
    except asyncio.TimeoutError:
        _log.warning("drain timed out; running calls are cut off", drain_timeout_s=timeout_s, gate=repr(gate))
    except Exception:  # noqa: BLE001 - the service ends in any case
        _log.exception("drain failed")


async def _until_signalled(service: Service, settings: ServingSettings) -> int:
    signalled, started = asyncio.Event(), asyncio.Event()
    _on_signals(signalled)

    async def serve() -> None:
        async with serving(service, settings):
            started.set()
            await signalled.wait()

    served, waited = asyncio.create_task(serve()), asyncio.create_task(signalled.wait())
    await asyncio.wait({served, waited}, return_when=asyncio.FIRST_COMPLETED)
    if signalled.is_set() and not started.is_set():
        served.cancel()
    try:
        await served
    except asyncio.CancelledError:
        _log.info("stopped while starting")
    except (CannotStart, OSError, ServiceError) as error:
        _log_why(error, started.is_set())
        return 1
    except Exception:  # noqa: BLE001 - the boundary of the process; its log is the answer
        _log.exception("the service failed" if started.is_set() else "the service could not start")
        return 1
    finally:
        waited.cancel()
    return 0


def _log_why(error: Exception, started: bool) -> None:
    """One line; the traceback of what an operator can mend would only hide it."""
    reason = " ".join(str(error).split()) or type(error).__name__
    _log.error("the service failed" if started else "the service could not start", reason=reason)
    _log.debug("the traceback", exc_info=error)


def _on_signals(signalled: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop(number: signal.Signals) -> None:
        if signalled.is_set():
            return
        _log.info("signal; draining", signal=number.name)
        signalled.set()
        # Some senders signal the process and then its group: only a signal that comes later means "at once".
        loop.call_later(_SECOND_SIGNAL_AFTER_S, give_back)

    def give_back() -> None:
        for handled in signals:
            loop.remove_signal_handler(handled)
            signal.signal(handled, signal.SIG_DFL)

    for handled in signals:
        loop.add_signal_handler(handled, stop, handled)
