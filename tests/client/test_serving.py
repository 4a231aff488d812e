"""The life of a service, in this process: health, errors, request ids, metrics, draining."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from loraplex.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    ServiceError,
    ServiceUnavailable,
    ShuttingDown,
)
from loraplex.serving import CannotStart, serving
from loraplex.serving.metrics import metrics_served
from loraplex.status import from_rpc_error
from loraplex.v1 import executor_pb2, executor_pb2_grpc

from .echo_service import SERVICE, Echo, EchoSettings

BUF = Path(sys.executable).with_name("buf")


@pytest.fixture
def echo() -> Echo:
    """The service under test."""
    return Echo(EchoSettings())


@pytest.fixture
async def stub(echo: Echo) -> AsyncIterator[executor_pb2_grpc.ExecutorStub]:
    """A stub of the service while it serves."""
    async with serving(echo, EchoSettings()) as address, aio.insecure_channel(address) as channel:
        yield executor_pb2_grpc.ExecutorStub(channel)


async def _health(address: str, service: str = "") -> int:
    async with aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=10)).status


async def _failure(call) -> ServiceError:
    with pytest.raises(aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value, "echo")


async def _last_of(call) -> executor_pb2.GenerateResponse:
    return [event async for event in call][-1]


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_health_turns_serving_when_the_start_is_done_and_not_serving_when_draining(echo: Echo):
    address, release = _free_address(), asyncio.Event()
    echo.start = release.wait  # type: ignore[method-assign,assignment]
    leave = asyncio.Event()

    async def serve() -> None:
        async with serving(echo, EchoSettings(listen=address)):
            await leave.wait()

    served = asyncio.create_task(serve())
    for service in ("", SERVICE):
        assert await _health(address, service) == health_pb2.HealthCheckResponse.NOT_SERVING
    release.set()
    while await _health(address, SERVICE) != health_pb2.HealthCheckResponse.SERVING:
        await asyncio.sleep(0.01)
    async with aio.insecure_channel(address) as channel:
        running = executor_pb2_grpc.ExecutorStub(channel).Generate(executor_pb2.GenerateRequest(prompt="wait"))
        await echo.servicer.waiting.wait()
        leave.set()
        while await _health(address) != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.01)
        echo.servicer.finish.set()
        await _last_of(running)
    await served


async def test_a_call_before_the_start_is_done_is_refused(echo: Echo):
    address, release = _free_address(), asyncio.Event()
    echo.start = release.wait  # type: ignore[method-assign,assignment]

    async def serve() -> None:
        async with serving(echo, EchoSettings(listen=address)):
            pass

    served = asyncio.create_task(serve())
    async with aio.insecure_channel(address) as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)
        error = await _failure(stub.GetModel(executor_pb2.GetModelRequest(), wait_for_ready=True))
    assert isinstance(error, ServiceUnavailable)
    assert error.retry_after_s == 1.0
    release.set()
    await served


async def test_a_running_call_is_finished_while_a_new_one_is_refused(echo: Echo):
    async with serving(echo, EchoSettings()) as address:
        channel = aio.insecure_channel(address)
        stub = executor_pb2_grpc.ExecutorStub(channel)
        running = asyncio.create_task(_last_of(stub.Generate(executor_pb2.GenerateRequest(prompt="wait"))))
        await echo.servicer.waiting.wait()

        async def refuse_then_finish() -> ServiceError:
            while "drain" not in echo.life:
                await asyncio.sleep(0.01)
            error = await _failure(stub.GetModel(executor_pb2.GetModelRequest()))
            echo.servicer.finish.set()
            return error

        refused = asyncio.create_task(refuse_then_finish())
    assert isinstance(await refused, ShuttingDown)
    assert (await running).HasField("summary")
    assert echo.life == ["start", "drain", "close"]
    await channel.close()


async def test_a_call_that_outlasts_the_drain_timeout_is_cut_off(echo: Echo):
    async with serving(echo, EchoSettings(drain_timeout_s=0.1)) as address:
        channel = aio.insecure_channel(address)
        call = executor_pb2_grpc.ExecutorStub(channel).Generate(executor_pb2.GenerateRequest(prompt="wait"))
        await call.read()
        await echo.servicer.waiting.wait()
    await asyncio.wait_for(echo.servicer.cancelled.wait(), 5)
    await channel.close()


async def test_a_start_that_fails_closes_the_service():
    echo = Echo(EchoSettings(start_s=-1))
    with pytest.raises(RuntimeError, match="cannot start"):
        async with serving(echo, EchoSettings()):
            pass
    assert echo.life == ["start", "close"]


async def test_a_second_service_cannot_share_a_port():
    async with serving(Echo(EchoSettings()), EchoSettings()) as address:
        with pytest.raises(CannotStart, match=f"^listen: {address}: Address already in use$"):
            async with serving(Echo(EchoSettings()), EchoSettings(listen=address)):
                pass


async def test_a_service_error_arrives_with_its_reason_and_remedy(stub: executor_pb2_grpc.ExecutorStub):
    call = stub.Generate(executor_pb2.GenerateRequest(prompt="refuse"), metadata=(("x-request-id", "abc"),))
    error = await _failure(_last_of(call))
    assert isinstance(error, QueueFull)
    assert (error.remedy, error.retry_after_s, error.metadata) == ("Wait.", 1.5, {"request_id": "abc"})


@pytest.mark.parametrize("method", ["GetModel", "Generate"])
async def test_bytes_that_are_no_message_are_the_callers_mistake(
    echo: Echo, method: str, caplog: pytest.LogCaptureFixture
):
    async with serving(echo, EchoSettings()) as address, aio.insecure_channel(address) as channel:
        path = f"/{SERVICE}/{method}"
        call = channel.unary_unary(path) if method == "GetModel" else channel.unary_stream(path)
        error = await _failure(call(b"\xff\xff") if method == "GetModel" else _last_of(call(b"\xff\xff")))
    assert isinstance(error, InvalidRequest)
    assert error.remedy
    assert "Traceback" not in caplog.text


async def test_a_fault_is_answered_without_its_text(stub: executor_pb2_grpc.ExecutorStub):
    with pytest.raises(aio.AioRpcError) as failed:
        await stub.ListResidents(executor_pb2.ListResidentsRequest())
    assert isinstance(from_rpc_error(failed.value, "echo"), InternalError)
    assert "secret" not in str(failed.value) + str(failed.value.trailing_metadata())


async def test_a_cancelled_call_reaches_the_handler(echo: Echo, stub: executor_pb2_grpc.ExecutorStub):
    before = _handled("Generate", "CANCELLED")
    call = stub.Generate(executor_pb2.GenerateRequest(prompt="wait"))
    await call.read()
    await echo.servicer.waiting.wait()
    call.cancel()
    await asyncio.wait_for(echo.servicer.cancelled.wait(), 5)
    while _handled("Generate", "CANCELLED") == before:
        await asyncio.sleep(0.01)


async def test_a_call_whose_deadline_passed_is_counted_as_that(echo: Echo, stub: executor_pb2_grpc.ExecutorStub):
    before = _handled("Generate", "DEADLINE_EXCEEDED"), _handled("Generate", "CANCELLED")
    error = await _failure(_last_of(stub.Generate(executor_pb2.GenerateRequest(prompt="wait"), timeout=0.3)))
    assert isinstance(error, DeadlineExceeded)
    await asyncio.wait_for(echo.servicer.cancelled.wait(), 5)
    while (_handled("Generate", "DEADLINE_EXCEEDED"), _handled("Generate", "CANCELLED")) == before:
        await asyncio.sleep(0.01)
    assert (_handled("Generate", "DEADLINE_EXCEEDED"), _handled("Generate", "CANCELLED")) == (before[0] + 1, before[1])


async def test_the_request_id_reaches_the_handler_and_the_next_service(stub: executor_pb2_grpc.ExecutorStub):
    answer = await stub.GetModel(executor_pb2.GetModelRequest(), metadata=(("x-request-id", "abc-1"),))
    assert (answer.device, answer.layout_digest) == ("abc-1", "abc-1")


@pytest.mark.parametrize("metadata", [(), (("x-request-id", "a b"),), (("x-request-id", "x" * 200),)])
async def test_an_absent_or_ugly_request_id_is_replaced(stub: executor_pb2_grpc.ExecutorStub, metadata):
    answer = await stub.GetModel(executor_pb2.GetModelRequest(), metadata=metadata)
    assert len(answer.device) == 32


def _handled(method: str, code: str, kind: str = "server_stream") -> float:
    labels = {"grpc_type": kind, "grpc_service": SERVICE, "grpc_method": method, "grpc_code": code}
    return REGISTRY.get_sample_value("grpc_server_handled_total", labels) or 0.0


async def test_calls_are_counted_under_the_established_names(stub: executor_pb2_grpc.ExecutorStub):
    before = _handled("GetModel", "OK", "unary"), _handled("Generate", "RESOURCE_EXHAUSTED")
    await stub.GetModel(executor_pb2.GetModelRequest())
    await _failure(_last_of(stub.Generate(executor_pb2.GenerateRequest(prompt="refuse"))))
    expected = before[0] + 1, before[1] + 1
    for _ in range(500):  # a call is counted just after its answer has left
        if (_handled("GetModel", "OK", "unary"), _handled("Generate", "RESOURCE_EXHAUSTED")) == expected:
            break
        await asyncio.sleep(0.01)
    assert (_handled("GetModel", "OK", "unary"), _handled("Generate", "RESOURCE_EXHAUSTED")) == expected
    labels = {"grpc_type": "unary", "grpc_service": SERVICE, "grpc_method": "GetModel"}
    for name in ("grpc_server_started_total", "grpc_server_handling_seconds_count"):
        assert REGISTRY.get_sample_value(name, labels)


def test_a_metrics_port_that_is_taken_is_named():
    with (
        metrics_served("127.0.0.1:0") as address,
        pytest.raises(CannotStart, match=f"^metrics_listen: {address}: Address already in use$"),
        metrics_served(address),
    ):
        pass


def test_metrics_are_served_over_http():
    with metrics_served("127.0.0.1:0") as address, urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert b"grpc_server_handled_total" in answer.read()


@pytest.mark.skipif(not BUF.exists() and not shutil.which("buf"), reason="buf is not installed")
async def test_reflection_lets_buf_curl_call_without_protos(echo: Echo):
    async with serving(echo, EchoSettings()) as address:
        buf = str(BUF) if BUF.exists() else "buf"
        url = f"http://{address}/{SERVICE}/GetModel"
        command = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-H", "x-request-id: buf", "-d", "{}"]
        answer = await asyncio.to_thread(subprocess.run, [*command, url], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["device"] == "buf"
