"""A service as a process: flags, log lines, signals, exit status."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from loraplex.serving import ServingSettings, load_settings
from loraplex.v1 import executor_pb2, executor_pb2_grpc

from .echo_service import EchoSettings

PROGRAM = [sys.executable, str(Path(__file__).with_name("echo_service.py"))]


@contextmanager
def _started(*flags: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([*PROGRAM, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _wait_for(child: subprocess.Popen[str], event: str) -> dict[str, str]:
    assert child.stderr is not None
    for line in child.stderr:
        if json.loads(line)["event"] == event:
            return json.loads(line)
    raise AssertionError(f"the service ended without {event!r}")


def _run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([*PROGRAM, *flags], capture_output=True, text=True, timeout=60, env=env)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_zero(number: signal.Signals):
    with _started() as child:
        address = _wait_for(child, "serving")["address"]
        with grpc.insecure_channel(address) as channel:
            call = executor_pb2_grpc.ExecutorStub(channel).GetModel(
                executor_pb2.GetModelRequest(), metadata=(("x-request-id", "abc"),)
            )
            assert call.device == "abc"
        logged = _wait_for(child, "call")
        assert (logged["method"], logged["code"], logged["request_id"], logged["service"]) == (
            "loraplex.v1.Executor/GetModel",
            "OK",
            "abc",
            "echo",
        )
        child.send_signal(number)
        stdout, _ = child.communicate(timeout=20)
        assert (child.returncode, stdout) == (0, "start drain close\n")


def test_a_signal_while_starting_ends_the_start():
    with _started("--start-s", "60") as child:
        _wait_for(child, "listening")
        child.terminate()
        stdout, _ = child.communicate(timeout=20)
        assert (child.returncode, stdout) == (0, "start close\n")


def test_a_second_signal_ends_the_process_at_once():
    with _started("--drain-timeout-s", "60") as child:
        address = _wait_for(child, "serving")["address"]
        with grpc.insecure_channel(address) as channel:
            call = executor_pb2_grpc.ExecutorStub(channel).Generate(executor_pb2.GenerateRequest(prompt="wait"))
            next(call)
            child.terminate()
            time.sleep(1.5)
            child.terminate()
            assert child.wait(20) == -signal.SIGTERM
            call.cancel()


def test_a_start_that_fails_exits_with_one_and_says_why():
    ended = _run("--start-s", "-1")
    assert ended.returncode == 1
    assert "RuntimeError: cannot start" in ended.stderr


def test_what_an_operator_can_mend_is_one_line(tmp_path: Path):
    missing = tmp_path / "missing"
    ended = _run("--needs", str(missing), "--log-level", "error")
    (line,) = ended.stderr.splitlines()
    said = json.loads(line)
    assert ended.returncode == 1
    assert (said["event"], said["reason"]) == (
        "the service could not start",
        f"[Errno 2] No such file or directory: '{missing}'",
    )
    console = _run("--needs", str(missing), "--log-level", "error", "--log-format", "console")
    assert len(console.stderr.splitlines()) == 1
    assert "No such file or directory" in console.stderr
    assert "Traceback" in _run("--needs", str(missing), "--log-level", "debug").stderr


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_port_that_is_taken_is_one_line_that_names_the_address(flag: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = _run(flag, address)
    (line,) = ended.stderr.splitlines()
    setting = flag[2:].replace("-", "_")
    assert (ended.returncode, json.loads(line)["reason"]) == (1, f"{setting}: {address}: Address already in use")


def test_lines_on_a_console_are_for_people():
    ended = _run("--start-s", "-1", "--log-format", "console")
    assert "[error    ] the service could not start" in ended.stderr


def test_help_shows_flag_variable_and_default_of_every_field():
    shown = " ".join(_run("--help").stdout.split())
    assert "--drain-timeout-s float" in shown
    assert "LORAPLEX_ECHO_DRAIN_TIMEOUT_S" in shown
    assert "(default: 30.0)" in shown
    assert "How long the start takes" in shown


def test_a_wrong_flag_is_named():
    ended = _run("--log-level", "loud")
    assert ended.returncode == 2
    assert "echo: --log-level: Input should be 'debug', 'info', 'warning' or 'error'" in ended.stderr


def test_a_wrong_variable_is_named():
    ended = _run(LORAPLEX_ECHO_DRAIN_TIMEOUT_S="soon")
    assert ended.returncode == 2
    assert "echo: LORAPLEX_ECHO_DRAIN_TIMEOUT_S: Input should be a valid number" in ended.stderr


def test_an_unknown_flag_is_refused():
    ended = _run("--loud")
    assert ended.returncode == 2
    assert "unrecognized arguments: --loud" in ended.stderr


@pytest.mark.parametrize(
    "address",
    [
        *("", "foo", "127.0.0.1", "127.0.0.1:", ":50051", ":-1", "127.0.0.1:-1", "127.0.0.1:99999", "127.0.0.1:0x10"),
        *("127.0.0.1:1 2", "127.0.0.1:\u00b2", "::1:50051", "a b:1", "http://host:1", "host:1/x"),
    ],
)
def test_an_address_that_is_none_is_wrong_usage(address: str, capsys: pytest.CaptureFixture[str]):
    for flag in ("--listen", "--metrics-listen"):
        with pytest.raises(SystemExit) as ended:
            load_settings(EchoSettings, [f"{flag}={address}"], "echo")
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"echo: {flag}: a")  # and no "Value error" of pydantic's


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:50051", "[::]:1", "localhost:65535", "a-b.example:80"])
def test_an_address_is_host_and_port(address: str):
    settings = load_settings(EchoSettings, ["--listen", address, "--metrics-listen", address], "echo")
    assert (settings.listen, settings.metrics_listen) == (address, address)


def test_help_shows_lists_as_one_would_write_them(capsys: pytest.CaptureFixture[str]):
    class Lists(ServingSettings):
        """Some lists."""

        sizes: tuple[tuple[int, int], ...] = ((64, 64), (128, 64))
        """Sizes."""
        names: tuple[str, ...] = ()
        """Names."""
        share: float = 0.5
        """100% is all."""

    with pytest.raises(SystemExit):
        load_settings(Lists, ["--help"], "lists")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--sizes list Sizes. (default: 64x64,128x64) [env: SIZES]" in shown
    assert "--names list Names. (default: empty) [env: NAMES]" in shown
    assert "--share float 100% is all. (default: 0.5) [env: SHARE]" in shown
    assert shown.endswith("[env: SHARE]")
