"""How an executor starts, and how it does not."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from executor.config import ExecutorSettings
from executor.service import ExecutorService, _on_own_thread
from loraplex.errors import StoreUnavailable
from loraplex.serving import CannotStart, serving

from .fake_store import StoreServer

BASE = Path("models/tiny_flux/base")


async def failure(settings: ExecutorSettings, **changes: object) -> Exception:
    """What comes out of a start with these settings; the model was not loaded."""
    own = settings.model_copy(update=changes)
    service = ExecutorService(own)
    with pytest.raises((CannotStart, StoreUnavailable)) as failed:
        async with serving(service, own):
            pass
    assert service.model is None
    return failed.value


async def test_without_a_store_nothing_is_loaded(settings: ExecutorSettings, nobody: str) -> None:
    error = await failure(settings, store=nobody, store_wait_s=0.3, base_model="org/no-such-model")
    assert isinstance(error, StoreUnavailable)
    assert nobody in error.message


async def test_an_executor_that_waits_for_its_store_says_so(
    settings: ExecutorSettings, nobody: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.service._SAY_EVERY_S", 0.1)
    await failure(settings, store=nobody, store_wait_s=0.5)
    said = capsys.readouterr()
    assert (said.out + said.err).count("waiting for the adapter store") >= 3


async def test_a_folder_that_is_no_pipeline_is_named(
    settings: ExecutorSettings, store_server: StoreServer, tmp_path: Path
) -> None:
    for base_model in (str(tmp_path), str(tmp_path / "missing")):
        error = await failure(settings, store=store_server.address, base_model=base_model)
        assert str(error).startswith(f"base_model: {base_model} ")
    (tmp_path / "model_index.json").write_text("{")
    error = await failure(settings, store=store_server.address, base_model=str(tmp_path))
    assert str(error).startswith(f"base_model: {tmp_path}: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_a_device_that_is_not_there_is_named(settings: ExecutorSettings, store_server: StoreServer) -> None:
    error = await failure(settings, store=store_server.address, device="cuda:1")
    assert str(error).startswith("device: cuda:1: ")


async def test_an_option_that_cannot_be_had_is_named(settings: ExecutorSettings, store_server: StoreServer) -> None:
    error = await failure(settings, store=store_server.address, attention_backend="no-such-kernel")
    assert str(error).startswith("attention_backend: ")


async def test_nobody_waits_for_a_start_that_is_cancelled_and_what_it_makes_is_discarded() -> None:
    go, discarded = threading.Event(), threading.Event()

    def slow() -> str:
        go.wait(20)
        return "made"

    waiting = asyncio.create_task(_on_own_thread(slow, lambda made: discarded.set() if made == "made" else None))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 2)
    go.set()
    assert await asyncio.to_thread(discarded.wait, 5)


async def test_what_a_start_raises_arrives() -> None:
    def failing() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await _on_own_thread(failing, lambda _: None)


def _executor(*flags: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "executor", "--base-model", str(BASE), "--listen", "127.0.0.1:0", *flags]
    return subprocess.Popen(
        [*command, "--metrics-listen", "127.0.0.1:0", "--resolutions", "64x64", "--threads", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.slow
def test_ctrl_c_while_torch_compiles_ends_the_process_at_once_and_leaves_nothing_behind(
    store_server: StoreServer, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    cache, tmp = str(tmp_path / "cache"), str(tmp_path / "tmp")
    child = _executor("--store", store_server.address, "--compile-cache-dir", cache, TMPDIR=tmp)
    try:
        assert child.stderr is not None
        assert any('"compiled artefacts"' in line for line in child.stderr)
        time.sleep(3)
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert any("stopped while starting" in line for line in child.stderr)
        assert child.wait(20) == 0
        assert time.monotonic() - began < 5
    finally:
        child.kill()
        child.communicate()
    assert not list((tmp_path / "tmp").glob("loraplex-compiled-*/*/*.py"))


def test_without_its_extra_the_executor_says_what_to_install() -> None:
    blocked = (
        "import runpy, sys; sys.modules['pydantic_settings'] = None; runpy.run_module('executor', None, '__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith("python -m executor: ")
    assert ended.stderr.endswith("pip install 'loraplex[executor]'\n")
    assert len(ended.stderr.splitlines()) == 1
