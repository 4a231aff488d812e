"""The command line against fakes of both services."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import PIL.Image
import pytest
import typer
from typer.testing import CliRunner, Result

from loraplex.adapter_arguments import parse_adapter
from loraplex.cli import app, choose_format
from loraplex.errors import AdapterRejected, QueueFull
from loraplex.options import AdapterSelection
from loraplex.pack_options import PackOptions
from loraplex.v1 import executor_pb2

from .conftest import FakeExecutor


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("text", "ref", "strength"),
    [
        ("sketch", "sketch", 1.0),
        ("sketch:0.8", "sketch", 0.8),
        ("sketch:-1", "sketch", -1.0),
        ("sketch:.5", "sketch", 0.5),
        ("sketch:1e-1", "sketch", 0.1),
        ("org/name@main:file.safetensors", "org/name@main:file.safetensors", 1.0),
        ("org/name@main:file.safetensors:0.8", "org/name@main:file.safetensors", 0.8),
        ("sketch:nan", "sketch:nan", 1.0),
        ("sketch:inf", "sketch:inf", 1.0),
        ("sketch:1e999", "sketch:1e999", 1.0),
        ("sketch:", "sketch:", 1.0),
        (":0.5", ":0.5", 1.0),
    ],
)
def test_the_last_part_of_an_adapter_is_its_strength_iff_it_is_a_finite_number(text: str, ref: str, strength: float):
    assert parse_adapter(text) == AdapterSelection(ref, strength)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sketch end=0.5", AdapterSelection("sketch", end=0.5)),
        ("org/name@rev:a.safetensors:0.8 start=.5", AdapterSelection("org/name@rev:a.safetensors", 0.8, start=0.5)),
        ("sketch:-1  components=a,b end=1 ", AdapterSelection("sketch", -1.0, components=("a", "b"))),
        (
            "x/wan:0.5 denoiser=transformer_2 waived=norm,bias max-rank=64 max_error=0.01",
            AdapterSelection("x/wan", 0.5, options=PackOptions("transformer_2", ("bias", "norm"), 64, 0.01)),
        ),
        ("my sketch:0.5", AdapterSelection("my sketch", 0.5)),
        ("my sketch", AdapterSelection("my sketch")),
        ("a=b", AdapterSelection("a=b")),
        ("org/name@a=b:c=d.safetensors", AdapterSelection("org/name@a=b:c=d.safetensors")),
    ],
)
def test_settings_of_an_adapter_follow_it_after_a_space(text: str, expected: AdapterSelection):
    assert parse_adapter(text) == expected


@pytest.mark.parametrize(
    "text", ["sketch strat=0.5", "sketch start=half", "sketch max_rank=1.5", "sketch end=0.1 end=0.5", "sketch end="]
)
def test_a_setting_that_is_not_known_or_wrong_is_wrong_usage(nobody: str, text: str):
    with pytest.raises(ValueError, match=r"none of|cannot be|twice"):
        parse_adapter(text)
    ran = _run("generate", "a cat", "-o", "cat.png", "-a", text, "--executor", nobody)
    assert (ran.exit_code, "--adapter" in ran.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [("a.png", None, "png"), ("a.JPG", None, "jpeg"), ("a.jpeg", "jpeg", "jpeg"), ("a.out", "webp", "webp")],
)
def test_the_format_comes_from_the_suffix_or_as_asked(name: str, asked: str | None, expected: str):
    assert choose_format(Path(name), asked) == expected


@pytest.mark.parametrize(("name", "asked"), [("a.png", "jpeg"), ("a.gif", None), ("a", None), ("a.png", "gif")])
def test_a_format_that_contradicts_the_suffix_is_wrong_usage(name: str, asked: str | None):
    with pytest.raises(typer.BadParameter):
        choose_format(Path(name), asked)


def test_generate_writes_the_image_and_closes_with_one_line(address: str, executor: FakeExecutor, tmp_path: Path):
    output = tmp_path / "cat.png"
    ran = _run("generate", "a cat", "-a", "sketch:0.8", "--seed", "7", "-o", str(output), "--executor", address)
    assert ran.exit_code == 0, ran.stderr
    assert output.read_bytes().startswith(b"\x89PNG")
    assert ran.stdout == f"{output}  seed 7  2.50 s  sketch:0.8 (rank 4)  0 recompilations\n"
    assert (executor.request.prompt, executor.request.adapters[0].strength) == ("a cat", 0.8)


def test_several_images_get_numbered_names(address: str, tmp_path: Path):
    ran = _run("generate", "a cat", "-n", "2", "-o", str(tmp_path / "cat.png"), "--executor", address)
    assert ran.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat-0.png", "cat-1.png"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-o", "cat.jpg", "--format", "png"),
        ("-o", "no-such-folder/cat.png"),
        ("-o", "cat.png", "--seed", "seven"),
        ("-o", "cat.png", "--image", "no-such-file.png"),
        ("-o", "cat.png", "--preview", "no-such-folder"),
        ("-o", "cat.png", "--preview-every-steps", "2"),
        (),
    ],
)
def test_wrong_usage_exits_with_two_and_asks_nobody(nobody: str, arguments: tuple[str, ...]):
    ran = _run("generate", "a cat", *arguments, "--executor", nobody)
    assert ran.exit_code == 2
    assert "Error" in ran.stderr


def test_a_failure_is_one_readable_block_on_stderr_and_exits_with_one(
    address: str, executor: FakeExecutor, tmp_path: Path
):
    executor.failure = AdapterRejected(
        "It holds NaN.", remedy="Train it again.", metadata={"cause": "NOT_FINITE", "key": "proj.lora_A"}
    )
    ran = _run("generate", "a cat", "-a", "bad", "-o", str(tmp_path / "cat.png"), "--executor", address)
    assert ran.exit_code == 1
    assert ran.stdout == ""
    assert ran.stderr.splitlines() == [
        "ADAPTER_REJECTED: It holds NaN.",
        "  remedy: Train it again.",
        "  cause: NOT_FINITE",
        "  key: proj.lora_A",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_full_queue_shows_when_to_come_back(address: str, executor: FakeExecutor, tmp_path: Path):
    executor.failure = QueueFull("Full.", retry_after_s=1.5)
    ran = _run("generate", "a cat", "-o", str(tmp_path / "cat.png"), "--executor", address)
    assert "  retry after: 1.5 s" in ran.stderr


def test_every_flag_reaches_the_executor(address: str, executor: FakeExecutor, tmp_path: Path):
    for name in ("in.png", "mask.png"):
        PIL.Image.new("L", (4, 4), 255).save(tmp_path / name)
    (tmp_path / "previews").mkdir()
    image, mask, previews = (str(tmp_path / name) for name in ("in.png", "mask.png", "previews"))
    ran = _run(
        *("generate", "a cat", "-o", str(tmp_path / "cat.png"), "-a", "sketch:0.8 end=0.5", "--executor", address),
        *("--image", image, "--mask", mask, "--image-strength", "0.7", "--priority", "low", "--request-id", "mine"),
        *("--preview", previews, "--preview-every-steps", "2"),
    )
    assert ran.exit_code == 0, ran.stderr
    sent = executor.request
    assert (sent.adapters[0].strength, sent.adapters[0].end) == (0.8, 0.5)
    assert sent.initial_image == (tmp_path / "in.png").read_bytes()
    assert sent.mask_image == (tmp_path / "mask.png").read_bytes()
    assert (sent.image_strength, sent.priority, sent.preview_every_steps) == (0.7, executor_pb2.PRIORITY_LOW, 2)
    assert executor.metadata["x-request-id"] == "mine"
    assert [path.name for path in (tmp_path / "previews").iterdir()] == ["preview-0-002.jpg"]


def test_a_priority_that_is_not_known_is_refused(address: str, tmp_path: Path):
    ran = _run("generate", "a cat", "-o", str(tmp_path / "cat.png"), "--priority", "urgent", "--executor", address)
    assert (ran.exit_code, ran.stderr.splitlines()[0]) == (1, "INVALID_REQUEST: priority 'urgent' is not known.")


def test_a_request_is_cancelled_by_its_id(address: str, executor: FakeExecutor):
    ran = _run("cancel", "known", "--executor", address)
    assert (ran.exit_code, ran.stdout) == (0, "cancelled known\n")
    ran = _run("cancel", "unknown", "--executor", address)
    assert (ran.exit_code, ran.stderr) == (1, "No request unknown is unfinished.\n")
    assert executor.cancelled == ["known", "unknown"]


def test_a_video_is_numbered_frames(address: str, tmp_path: Path):
    ran = _run("generate", "a cat", "--num-frames", "3", "-o", str(tmp_path / "cat.png"), "--executor", address)
    assert ran.exit_code == 0, ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat-000.png", "cat-001.png", "cat-002.png"]
    with PIL.Image.open(tmp_path / "cat-002.png") as frame:
        assert frame.getpixel((0, 0)) == (80, 0, 0)


def test_a_video_in_a_webp_file_is_an_animation(address: str, tmp_path: Path):
    arguments = ("--num-frames", "3", "-n", "2", "--fps", "10", "-o", str(tmp_path / "cat.webp"))
    ran = _run("generate", "a cat", *arguments, "--executor", address)
    assert ran.exit_code == 0, ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat-0.webp", "cat-1.webp"]
    with PIL.Image.open(tmp_path / "cat-1.webp") as video:
        assert (video.format, video.n_frames) == ("WEBP", 3)  # type: ignore[attr-defined]
        video.seek(1)
        video.load()
        assert video.info["duration"] == 100


def test_adapters_are_a_table_or_json(address: str):
    assert "sunset.safetensors" in _run("adapters", "--store", address).stdout
    listed = json.loads(_run("adapters", "--store", address, "--json").stdout)
    assert [adapter["ref"] for adapter in listed] == ["neon", "sketch", "sunset"]


def test_inspect_tells_why_an_adapter_does_not_apply(address: str):
    ran = _run("inspect", "sketch", "--executor", address, "--store", address)
    assert "NOT_FINITE: It holds NaN." in ran.stdout
    assert "1 modules, rank 4" in ran.stdout


def test_inspect_without_an_executor_describes_the_file(address: str, nobody: str):
    ran = _run("inspect", "sketch", "--executor", nobody, "--store", address, "--json")
    assert json.loads(ran.stdout)["applicable"] is None


def test_model_is_a_table_or_json(address: str):
    assert "FluxPipeline" in _run("model", "--executor", address).stdout
    assert json.loads(_run("model", "--executor", address, "--json").stdout)["layout"]["base_model"] == "tiny"


def test_the_rows_that_adapters_can_have_are_told_without_the_reserved_one(address: str):
    assert "at most 8 in one request, 15 resident" in _run("model", "--executor", address).stdout


def test_an_absent_service_is_named(nobody: str):
    ran = _run("model", "--executor", nobody)
    assert ran.exit_code == 1
    assert ran.stderr.startswith(f"SERVICE_UNAVAILABLE: {nobody} cannot be reached")


def test_the_module_runs_as_a_program(address: str, tmp_path: Path):
    command = [sys.executable, "-m", "loraplex", "generate", "a cat", "-o", "cat.png", "--executor", address]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("cat.png  seed 0")
    assert (tmp_path / "cat.png").exists()


def _heed_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_cancels_the_call_and_exits_with_130(address: str, executor: FakeExecutor, tmp_path: Path):
    executor.hold = True
    command = [sys.executable, "-m", "loraplex", "generate", "a cat", "-o", "cat.png", "--executor", address]
    # A shell that runs these tests in the background has SIGINT ignored, and a child would inherit that.
    child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_sigint)
    try:
        deadline = time.monotonic() + 20
        while not executor.request.prompt and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=20)
    finally:
        child.kill()
    assert (child.returncode, stderr) == (130, "")
    assert executor.ended.wait(10)


def test_an_output_that_cannot_be_written_is_wrong_usage_and_nothing_is_generated(
    address: str, executor: FakeExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "read-only").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: "read-only" not in str(path))  # root may write anywhere
    for output in ("folder.png", "read-only/cat.png", f"{'x' * 252}.png"):
        ran = _run("generate", "a cat", "-o", str(tmp_path / output), "--executor", address)
        assert (ran.exit_code, "--output" in ran.stderr) == (2, True)
    assert executor.request.prompt == ""


def test_an_image_that_cannot_be_written_in_the_end_is_kept_elsewhere(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    output = tmp_path / f"{'x' * 251}.png"  # as long as a name may be, but the two images are numbered
    ran = _run("generate", "a cat", "-n", "2", "-o", str(output), "--executor", address)
    assert ran.exit_code == 1
    assert ran.stderr == f"{output} cannot be written: File name too long\n"
    kept = sorted(tmp_path.glob("loraplex-*/image-*.png"))
    assert ran.stdout.startswith(" ".join(map(str, kept)))
    assert [path.read_bytes()[:4] for path in kept] == [b"\x89PNG"] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "a\udcffb", "-o", "cat.png"),
        ("generate", "a", "-o", "cat.png", "--negative-prompt", "\udcff"),
        ("generate", "a", "-o", "cat.png", "-a", "sk\udcff:0.5"),
        ("generate", "a", "-o", "cat.png", "--executor", "\udcff:1"),
        ("inspect", "sk\udcff"),
        ("cancel", "\udcff"),
    ],
)
def test_a_byte_that_is_no_utf_8_is_one_readable_error(nobody: str, arguments: tuple[str, ...]):
    ran = _run(*arguments, *(() if "--executor" in arguments else ("--executor", nobody)))
    assert ran.exit_code == 1
    assert ran.stderr.startswith("INVALID_REQUEST: ")
    assert "udcff" in ran.stderr


@pytest.mark.parametrize("timeout_s", ["nan", "inf", "0", "-1", "1e308"])
def test_a_timeout_that_is_none_is_refused_by_name(nobody: str, timeout_s: str):
    ran = _run("generate", "a cat", "-o", "cat.png", f"--timeout-s={timeout_s}", "--executor", nobody)
    assert (ran.exit_code, "field: timeout_s" in ran.stderr) == (1, True)


def test_help_keeps_the_brackets_of_a_reference():
    assert "org/name[@revision][:file]" in " ".join(_run("inspect", "--help").stdout.split())
