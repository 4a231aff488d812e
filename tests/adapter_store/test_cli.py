"""The store's command line as scripts use it: exit status, JSON, and files that other tools read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from typer.testing import CliRunner

from adapter_store.cache import PackedCache
from adapter_store.cli import app
from adapter_store.layouts import Layouts
from tests.adapter_store.samples import WIDTH, delta, flux_layout, kohya, peft, unpack, write_adapter

TINY_FLUX = Path(__file__).parents[2] / "models/tiny_flux"
SKETCH = str(TINY_FLUX / "adapters/sketch.safetensors")
BASE = str(TINY_FLUX / "base")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no settings of the machine's."""
    for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LORAPLEX_STORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def run(*arguments: object) -> tuple[int, str, str]:
    with capture_logs():
        done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def run_json(*arguments: object) -> tuple[int, Any]:
    status, out, _ = run(*arguments, "--json")
    return status, json.loads(out)


def test_a_file_without_a_base_is_described():
    status, report = run_json("inspect", SKETCH)
    assert status == 0
    assert report["tensors"] == report["applied_tensors"] > 0
    assert {"component", "name", "rank", "algorithm"} <= set(report["modules"][0])
    assert report["applicable"] is False
    assert "rejection" not in report


def test_a_file_with_its_base_is_applicable_and_every_tensor_accounted_for():
    status, report = run_json("inspect", SKETCH, "--base", BASE)
    assert (status, report["applicable"]) == (0, True)
    assert report["applied_tensors"] + report["zero_tensors"] + len(report["waived_keys"]) == report["tensors"]
    assert all(module["packed_rank"] > 0 for module in report["modules"])


def test_a_file_for_another_base_is_refused_with_status_3():
    status, report = run_json("inspect", SKETCH, "--base", "flux.1-dev")
    assert (status, report["applicable"]) == (3, False)
    assert report["rejection"]["cause"] == "SHAPE_MISMATCH"
    status, out, _ = run("inspect", SKETCH, "--base", "flux.1-dev")
    assert (status, "refused, SHAPE_MISMATCH" in out) == (3, True)


def test_what_a_person_reads_names_every_module_its_rank_and_the_verdict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = run("inspect", SKETCH, "--base", BASE)
    assert status == 0
    assert "transformer_blocks.#.attn.to_q" in out
    assert "applicable to" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", SKETCH, "--base", "no-such-base"),
        ("inspect", SKETCH, "--dtype", "F8"),
        ("inspect", SKETCH, "--base", BASE, "--waive", "everything"),
        ("inspect", SKETCH, "--base", BASE, "--max-error", "2"),
        ("inspect", "../outside"),
        ("inspect",),
        ("pack", SKETCH, "--base", BASE, "-o", "/no/such/folder/out.safetensors"),
        ("evict",),
        ("evict", "a", "--all"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]):
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert err


def test_a_file_that_does_not_exist_is_status_1():
    status, _, err = run("inspect", "nobody-has-this")
    assert (status, "ADAPTER_NOT_FOUND" in err) == (1, True)
    assert run_json("inspect", "nobody-has-this")[1]["error"]["reason"] == "ADAPTER_NOT_FOUND"


def test_what_is_packed_is_what_the_cache_would_hold_and_unpacks_to_the_same_differences(tmp_path: Path):
    folder = tmp_path / "base"
    out, back = tmp_path / "packed.safetensors", tmp_path / "back.safetensors"
    tensors = kohya("lora_unet_double_blocks_0_img_attn_proj", 128, 128, 4, alpha=1)
    path = write_adapter(tmp_path / "a.safetensors", tensors)
    status, facts = run_json("pack", path, "--base", BASE, "-o", out, "--dtype", "F32")
    assert (status, facts["rank"]) == (0, 4)
    assert facts["size_bytes"] == out.stat().st_size
    name = "transformer.transformer_blocks.0.attn.to_out.0"
    expected = delta(tensors, "lora_unet_double_blocks_0_img_attn_proj", 0.25)
    assert abs(unpack(out)[name] - expected).max() < 1e-6
    assert run_json("unpack", out, "-o", back)[0] == 0
    assert set(load_file(back)) == {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
    assert not folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "packed.safetensors", "back.safetensors"}


def test_a_refused_file_writes_nothing_and_leaves_what_was_there(tmp_path: Path):
    bad = tmp_path / "bad.safetensors"
    save_file({"transformer.proj_out.lora_A.weight": torch.ones(2, 128)}, bad)
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    status, _, err = run("pack", bad, "--base", BASE, "-o", out)
    assert (status, "INCOMPLETE" in err) == (3, True)
    assert out.read_bytes() == b"mine"


def test_a_cut_is_made_when_it_is_allowed_and_reported(tmp_path: Path):
    path = write_adapter(tmp_path / "a.safetensors", peft("transformer.proj_out", 32, 128, 16))
    refused, _ = run_json("pack", path, "--base", BASE, "-o", tmp_path / "o.safetensors", "--max-rank", 8)
    assert refused == 3
    arguments = ("--base", BASE, "-o", tmp_path / "o.safetensors", "--max-rank", 8, "--max-error", 0.9)
    status, facts = run_json("pack", path, *arguments)
    assert (status, facts["rank"]) == (0, 8)
    assert 0 < facts["report"]["modules"][0]["error"] < 0.9


def test_prefetch_list_verify_and_evict(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAPLEX_STORE_LOCAL_ROOTS", str(tmp_path / "root"))
    write_adapter(tmp_path / "root" / "mine.safetensors", peft("transformer.proj_out", 4, WIDTH, 2))
    assert run("prefetch", "mine")[0] == 1  # no layout is registered yet
    layout = flux_layout()
    Layouts(own_cache / "layouts").register(layout.to_proto())
    status, facts = run_json("prefetch", "mine")
    assert (status, facts["layout_digest"], facts["rank"]) == (0, layout.digest, 2)
    listed = run_json("list")[1]
    assert [(one["ref"], one["cached"][0]["digest"]) for one in listed] == [("mine", facts["digest"])]
    assert run_json("verify-cache") == (
        0,
        {"sound": [facts["digest"]], "adopted": [], "damaged": [], "unknown": [], "missing": []},
    )
    packed = own_cache / "packed" / f"{facts['digest']}.safetensors"
    packed.write_bytes(packed.read_bytes()[:-1] + b"?")
    assert run_json("verify-cache")[1]["damaged"] == [facts["digest"]]
    assert not packed.exists()
    run("prefetch", "mine")
    assert run_json("evict", "mine", "unknown") == (
        1,
        {"evicted": [facts["digest"]], "freed_bytes": facts["size_bytes"], "not_found": ["unknown"]},
    )
    assert PackedCache(own_cache, 1 << 30).entries() == []


def test_a_list_in_a_pipe_has_whole_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAPLEX_STORE_LOCAL_ROOTS", str(tmp_path / "root"))
    name = "styles/" + "a-rather-long-name-of-a-folder/" * 5 + "of-an-adapter"
    write_adapter(tmp_path / "root" / f"{name}.safetensors", peft("transformer.proj_out", 4, WIDTH, 2))
    status, out, _ = run("list")
    assert status == 0
    assert f" {name} " in out


def test_names_in_a_file_cannot_command_the_terminal(tmp_path: Path):
    hostile = "transformer.\x1b]k;owned\x07\u202eproj_out"
    path = write_adapter(tmp_path / "a.safetensors", peft(hostile, 4, WIDTH, 2))
    for arguments in (("inspect", path), ("inspect", path, "--base", BASE), ("evict", "\x1b[2J\udcff")):
        _, out, err = run(*arguments)
        assert not set("\x1b\x07\u202e\udcff") & set(out + err)
    assert r"\x1b]k;owned\x07\u202eproj_out" in run("inspect", path)[1]


def test_prefetch_of_a_bad_file_is_status_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAPLEX_STORE_LOCAL_ROOTS", str(tmp_path / "root"))
    (tmp_path / "root").mkdir()
    save_file({"transformer.proj_out.lora_A.weight": torch.ones(2, 128)}, tmp_path / "root" / "half.safetensors")
    status, out, err = run("prefetch", "half", "--base", "flux.1-dev")
    assert (status, out) == (3, "")
    assert err.startswith("half: resolving") or "half: ADAPTER_REJECTED" in err


def test_the_module_serves_by_default_and_runs_commands_by_name():
    command = [sys.executable, "-m", "adapter_store", "inspect", SKETCH, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["tensors"] > 0
