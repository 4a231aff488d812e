"""The services as processes of their own: a store alone, or both with the seconds until they serve and their memory."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local import HOST, ROOT, TINY_FLUX, Local, Running, services
from deploy.processes import Process

_POLL_S = 0.02


@contextmanager
def adapter_store(adapters: Path, cache: Path) -> Iterator[str]:
    """The address of a store that serves the files below `adapters`; it may still be starting."""
    address = f"{HOST}:{_free_port()}"
    listen = ["--listen", address, "--metrics-listen", f"{HOST}:0"]
    command = [
        sys.executable,
        "-m",
        "adapter_store",
        *listen,
        "--local-roots",
        str(adapters),
        "--cache-dir",
        str(cache),
    ]
    process = Process("store", command, _to_stderr, cwd=ROOT, env={})
    try:
        yield address
    finally:
        process.stop(grace_s=10.0)


@contextmanager
def both_services(
    adapters: Path, cache: Path, base_model: Path = TINY_FLUX, executor_flags: tuple[str, ...] = ()
) -> Iterator[tuple[Running, float, float]]:
    """Both, serving, with the seconds that store and executor took for it since they were started."""
    local = Local(
        base_model=base_model,
        executor_flags=executor_flags,
        adapters=adapters,
        cache=cache,
        store_port=_free_port(),
        executor_port=_free_port(),
        start_timeout_s=600.0,
    )
    seconds: dict[int, float] = {}
    began = time.monotonic()

    def watch(port: int) -> None:
        _wait_until_serving(f"{HOST}:{port}", began + local.start_timeout_s)
        seconds[port] = time.monotonic() - began

    ports = (local.store_port, local.executor_port)
    watchers = [threading.Thread(target=watch, args=(port,), daemon=True) for port in ports]
    for watcher in watchers:
        watcher.start()
    with services(local, _to_stderr) as running:
        for watcher in watchers:
            watcher.join()
        yield running, seconds[ports[0]], seconds[ports[1]]


def resident_bytes(pid: int) -> int:
    """RSS of a process and its descendants."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


def _wait_until_serving(address: str, deadline: float) -> None:
    with grpc.insecure_channel(address, options=(("grpc.max_reconnect_backoff_ms", 50),)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline and not _is_serving(health):
            time.sleep(_POLL_S)


def _is_serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        # The type stubs of this package leave the method out.
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)  # type: ignore[attr-defined]
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _to_stderr(name: str, line: str) -> None:
    sys.stderr.write(f"{name} | {line}\n")
