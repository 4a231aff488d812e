"""Calls of a served executor, for tests."""

import asyncio
from typing import Any

import pytest
from grpc import aio

from loraplex.errors import ServiceError
from loraplex.status import from_rpc_error
from loraplex.v1 import executor_pb2 as pb

Stub = Any


async def residents(stub: Stub) -> pb.ListResidentsResponse:
    """The adapters in the rows."""
    return await stub.ListResidents(pb.ListResidentsRequest(), timeout=20)


def request(*adapters: tuple[str, float], **fields: Any) -> pb.GenerateRequest:
    """A request of three steps with these adapters and strengths."""
    chosen = [pb.AdapterSelection(ref=ref, strength=strength) for ref, strength in adapters]
    return pb.GenerateRequest(**{"prompt": "a red circle", "num_inference_steps": 3, "adapters": chosen, **fields})


async def events(call: Any) -> list[pb.GenerateResponse]:
    """The messages of a call that have not been read."""
    got = []
    while (event := await call.read()) is not aio.EOF:
        got.append(event)
    return got


async def failure(call: Any) -> ServiceError:
    """The error that a call ends with."""
    with pytest.raises(aio.AioRpcError) as failed:
        await events(call)
    return from_rpc_error(failed.value, "executor")


async def until_free(stub: Stub) -> None:
    """Wait until nothing is pinned."""
    for _ in range(500):
        if not any(one.pins for one in (await residents(stub)).residents):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("an adapter stays pinned")
