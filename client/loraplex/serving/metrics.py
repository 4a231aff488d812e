"""The Prometheus metrics of gRPC calls under their established names, and the port that serves all metrics."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Histogram, start_http_server

from loraplex.serving.addresses import split
from loraplex.serving.errors import CannotStart

CALL_LABELS = ("grpc_type", "grpc_service", "grpc_method")

# From a cached lookup to a long generation on a slow machine.
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)

STARTED = Counter("grpc_server_started", "Calls that were started on the server.", CALL_LABELS)
HANDLED = Counter("grpc_server_handled", "Calls that were ended on the server.", (*CALL_LABELS, "grpc_code"))
SECONDS = Histogram("grpc_server_handling_seconds", "Seconds from start to end.", CALL_LABELS, buckets=_SECONDS)


@contextmanager
def metrics_served(listen: str) -> Iterator[str]:
    """Serve the process's metrics over HTTP on `listen`; yields the address with the real port. Raises CannotStart."""
    host, port = split(listen)
    try:
        server, thread = start_http_server(port, addr=host)
    except OSError as error:
        raise CannotStart(f"metrics_listen: {listen}: {error.strerror or error}") from error
    try:
        yield f"{listen.rpartition(':')[0]}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
