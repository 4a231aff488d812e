"""Both services on this machine, as real processes: for `make run`, `make demo` and the end-to-end tests.

with services(Local(store_port=0, executor_port=0)) as running:
    Client(executor=running.executor, store=running.store)
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.processes import LogLine, Process

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"

TINY_FLUX = ROOT / "models/tiny_flux/base"
TINY_FLUX_ENV = ROOT / "deploy/tiny_flux.env"

# Chunks of 1 MiB would otherwise be mapped and unmapped one by one, which costs gRPC a factor of its speed.
_CHILD_ENV = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
    "PYTHONUNBUFFERED": "1",
}

_SAY_EVERY_S = 15.0

# Longer than a service's own drain_timeout_s.
_GRACE_S = 45.0


class StartFailed(RuntimeError):
    """A service ended, or was not serving in time."""


@dataclass(frozen=True)
class Local:
    """What to serve, and where; a port of 0 takes a free one. Everything else comes from the environment."""

    base_model: Path = TINY_FLUX
    adapters: Path = ROOT / "models/tiny_flux/adapters"
    cache: Path = ROOT / ".run/cache"
    store_port: int = 50051
    store_metrics_port: int = 0
    executor_port: int = 50061
    executor_metrics_port: int = 0
    log_format: str = "console"
    start_timeout_s: float = 300.0
    executor_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Running:
    """Addresses, host:port, and processes of two services that are serving."""

    store: str
    store_metrics: str
    executor: str
    executor_metrics: str
    processes: tuple[Process, ...]

    def ended(self) -> Process | None:
        """A service that has ended, if any."""
        return next((process for process in self.processes if process.exit_status is not None), None)


def print_line(name: str, line: str) -> None:
    """Print one line of a service's log behind its name."""
    sys.stderr.write(f"{name:8} | {line}\n")


@contextmanager
def services(local: Local, log: LogLine = print_line) -> Iterator[Running]:
    """Start both services and wait until they serve; on leaving, the executor drains first, as it needs the store.

    Raises StartFailed. Ends the children in any case.
    """
    store, store_metrics = _address(local.store_port), _address(local.store_metrics_port)
    executor, executor_metrics = _address(local.executor_port), _address(local.executor_metrics_port)
    commands = {
        "store": ["adapter_store", "--listen", store, "--metrics-listen", store_metrics, *_store_flags(local)],
        "executor": [
            *("executor", "--listen", executor, "--metrics-listen", executor_metrics),
            *_executor_flags(local, store),
        ],
    }
    with ExitStack() as children:
        processes = []
        for name, arguments in commands.items():
            command = [sys.executable, "-m", *arguments, "--log-format", local.log_format]
            process = Process(name, command, log, cwd=ROOT, env=_environment(local.base_model))
            children.callback(process.stop, _GRACE_S)
            processes.append(process)
        running = Running(store, store_metrics, executor, executor_metrics, tuple(processes))
        began = time.monotonic()
        for name, address in (("the adapter store", store), ("the executor", executor)):
            for waited_s in _waiting_until_serving(address, running, began + local.start_timeout_s):
                log("local", f"{name} is starting, for {waited_s:.0f} s now; it has {local.start_timeout_s:.0f} s")
        yield running


def exit_on_signals() -> None:
    """From now on SIGTERM ends this process like Ctrl-C, through every `finally`, so that no child is left behind.

    Ctrl-C does so too where a shell that started it in the background had it ignored.
    """

    def interrupt(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # make passes on what the whole group was sent already
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(
    base_model: Annotated[Path, typer.Option(help="Folder of a diffusers pipeline.")] = Local.base_model,
    adapters: Annotated[Path, typer.Option(help="Folder whose adapters may be asked for by name.")] = Local.adapters,
    cache: Annotated[Path, typer.Option(help="Folder of the store's cache.")] = Local.cache,
    store_port: Annotated[int, typer.Option(help="Port of the adapter store; 0 takes a free one.")] = Local.store_port,
    executor_port: Annotated[int, typer.Option(help="Port of the executor; 0 takes a free one.")] = Local.executor_port,
    store_metrics_port: Annotated[int, typer.Option(help="Port of the store's metrics; 0 takes a free one.")] = 9451,
    executor_metrics_port: Annotated[
        int, typer.Option(help="Port of the executor's metrics; 0 takes a free one.")
    ] = 9461,
) -> None:
    """Run both services in the foreground until Ctrl-C or SIGTERM; exits with 1 when one of them dies."""
    exit_on_signals()
    local = Local(base_model, adapters, cache, store_port, store_metrics_port, executor_port, executor_metrics_port)
    print_line("local", "starting both; the first time torch compiles the model, which takes minutes, later seconds")
    try:
        with services(local) as running:
            print_line("local", f"serving: executor {running.executor}, store {running.store}; Ctrl-C stops both")
            print_line("local", 'try: loraplex generate "a cat on a blue background" --seed 7 -o cat.png')
            ended = _wait_for_an_end(running)
            print_line("local", f"{ended.name} ended with status {ended.exit_status}; stopping the other")
        raise typer.Exit(1)
    except StartFailed as error:
        print_line("local", str(error))
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        print_line("local", "both are stopped")


def _store_flags(local: Local) -> list[str]:
    return ["--local-roots", str(local.adapters), "--cache-dir", str(local.cache)]


def _executor_flags(local: Local, store: str) -> list[str]:
    return ["--base-model", str(local.base_model), "--store", store, *local.executor_flags]


def _environment(base_model: Path) -> dict[str, str]:
    if base_model.resolve() != TINY_FLUX:
        return _CHILD_ENV
    lines = [line.partition("=") for line in TINY_FLUX_ENV.read_text().splitlines() if not line.startswith("#")]
    fitting = {name: value for name, _, value in lines if name not in os.environ}
    return {**fitting, **_CHILD_ENV}


def _wait_for_an_end(running: Running) -> Process:
    while True:
        ended = running.ended()
        if ended:
            return ended
        time.sleep(0.2)


def _waiting_until_serving(address: str, running: Running, deadline: float) -> Iterator[float]:
    """End when `address` serves; until then yield every _SAY_EVERY_S how many seconds it has taken."""
    began = said = time.monotonic()
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while not _is_serving(health):
            now = time.monotonic()
            ended = running.ended()
            if ended:
                raise StartFailed(f"{ended.name} ended with status {ended.exit_status} before it was serving")
            if now > deadline:
                raise StartFailed(f"{address} was not serving in time")
            if now - said >= _SAY_EVERY_S:
                said = now
                yield now - began
            time.sleep(0.1)


def _is_serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        # The type stubs of this package leave the method out.
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)  # type: ignore[attr-defined]
    except grpc.RpcError:
        return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def _address(port: int) -> str:
    if port:
        return f"{HOST}:{port}"
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return f"{HOST}:{probe.getsockname()[1]}"


if __name__ == "__main__":
    typer.run(run)
