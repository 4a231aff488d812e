"""The executor's settings."""

import pytest
from pydantic import ValidationError

from executor.config import ExecutorSettings
from loraplex.serving import load_settings


def test_flags_are_read() -> None:
    argv = ["--base-model", "m", "--resolutions", "64x64, 128X64", "--batch-sizes", "4,1,2,2", "--compile", "off"]
    settings = load_settings(ExecutorSettings, argv, "executor")
    assert settings.resolutions == ((64, 64), (128, 64))
    assert settings.batch_sizes == (1, 2, 4)
    assert settings.compile == "off"


def test_metadata_are_on_unless_a_flag_says_no() -> None:
    flags = ["--base-model", "m"]
    assert load_settings(ExecutorSettings, flags, "executor").image_metadata
    assert not load_settings(ExecutorSettings, [*flags, "--no-image-metadata"], "executor").image_metadata


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_EXECUTOR_BASE_MODEL", "from-environment")
    monkeypatch.setenv("LORAPLEX_EXECUTOR_BATCH_SIZES", "1,3")
    settings = load_settings(ExecutorSettings, [], "executor")
    assert (settings.base_model, settings.batch_sizes) == ("from-environment", (1, 3))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resolutions", "64"),
        ("resolutions", "64x"),
        ("resolutions", "63x64"),
        ("resolutions", "0x64"),
        ("resolutions", "-8x64"),
        ("resolutions", "²x64"),
        ("resolutions", ""),
        ("batch_sizes", "2,4"),
        ("batch_sizes", "0,1"),
        ("batch_sizes", "1,b"),
        ("batch_sizes", ""),
        ("arena_rows", 64),
        ("arena_rows", 1),
        ("rows_per_sample", 0),
        ("max_queue_length", 0),
        ("max_running_jobs", 0),
        ("max_num_frames", 0),
        ("default_num_frames", 0),
        ("max_image_bytes", 0),
        ("max_image_bytes", (32 << 20) + 1),  # a message could not carry it
        ("max_image_pixels", 0),
        ("batch_wait_ms", -1),
        ("batch_wait_ms", "inf"),
        ("batch_wait_ms", "nan"),
        ("store_wait_s", "inf"),
        ("fetch_timeout_s", "inf"),
        ("default_guidance_scale", "inf"),
        ("compile", "always"),
        ("dtype", "F64"),
        ("no_such_field", 1),
        ("default_num_inference_steps", 101),  # above the most that a request may ask for
        ("default_num_frames", 82),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("store", "foo"),
        ("store", "127.0.0.1:0"),
        ("store", ""),
    ],
)
def test_a_wrong_value_stops_the_start(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        ExecutorSettings(base_model="m", **{field: value})  # type: ignore[arg-type]


def test_a_wrong_value_names_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(ExecutorSettings, ["--base-model", "m", "--resolutions", "63x64"], "executor")
    assert "--resolutions" in capsys.readouterr().err


def test_settings_do_not_change() -> None:
    settings = ExecutorSettings(base_model="m")
    with pytest.raises(ValidationError):
        settings.arena_rows = 5  # type: ignore[misc]
