"""A small service on the executor's stubs: how a service uses `loraplex.serving`, in tests and as a process."""

import asyncio
import sys
from pathlib import Path

from grpc import aio
from pydantic_settings import SettingsConfigDict

from loraplex.errors import QueueFull
from loraplex.serving import ServingSettings, load_settings, outgoing_metadata, request_id, run
from loraplex.v1 import executor_pb2, executor_pb2_grpc

SERVICE = "loraplex.v1.Executor"


class EchoSettings(ServingSettings):
    """Settings with one field of their own."""

    model_config = SettingsConfigDict(env_prefix="LORAPLEX_ECHO_")

    start_s: float = 0.0
    """How long the start takes; negative makes it fail."""
    needs: str = ""
    """A folder without which it cannot start."""


class Servicer(executor_pb2_grpc.ExecutorServicer):
    """Answers, streams, refuses, fails or waits."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.finish = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def GetModel(self, request, context):
        """The request's id, as the handler and the next service see it."""
        return executor_pb2.GetModelResponse(
            device=request_id(), layout_digest=dict(outgoing_metadata())["x-request-id"]
        )

    async def ListResidents(self, request, context):
        """A fault."""
        raise KeyError("a secret")

    async def Generate(self, request, context):
        """One event, then what the prompt says."""
        yield executor_pb2.GenerateResponse(queued=executor_pb2.Queued())
        if request.prompt == "refuse":
            raise QueueFull("Full.", remedy="Wait.", retry_after_s=1.5)
        if request.prompt == "wait":
            try:
                self.waiting.set()
                await self.finish.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        yield executor_pb2.GenerateResponse(summary=executor_pb2.Summary(request_id=request_id()))


class Echo:
    """The service, with its life written down in `life`."""

    name = "echo"
    grpc_services = (SERVICE,)

    def __init__(self, settings: EchoSettings) -> None:
        self.start_s, self.needs = settings.start_s, settings.needs
        self.servicer = Servicer()
        self.life: list[str] = []

    def register(self, server: aio.Server) -> None:
        """Add the servicer."""
        executor_pb2_grpc.add_ExecutorServicer_to_server(self.servicer, server)

    async def start(self) -> None:
        """Take `start_s` seconds."""
        self.life.append("start")
        if self.needs:
            list(Path(self.needs).iterdir())
        if self.start_s < 0:
            raise RuntimeError("cannot start")
        await asyncio.sleep(self.start_s)

    async def drain(self) -> None:
        """Let those who wait finish."""
        self.life.append("drain")

    async def close(self) -> None:
        """Nothing to release."""
        self.life.append("close")
        sys.stdout.write(" ".join(self.life) + "\n")


if __name__ == "__main__":
    settings = load_settings(EchoSettings, sys.argv[1:], "echo")
    sys.exit(run(Echo(settings), settings))
