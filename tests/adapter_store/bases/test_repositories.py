"""A repository on the hub as a base: its configs and nothing else of it."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_store.bases import find_base, known_layout
from adapter_store.bases.catalogue import component_configs
from adapter_store.hub import fetch_configs
from loraplex.errors import AdapterAccessDenied, InvalidAdapterRef, InvalidRequest, SourceUnavailable
from loraplex.layout import Layout
from tests.adapter_store.fake_hub import BROKEN, GATED, FakeHub, Repo, fake_hub

TINY_FLUX = Path(__file__).parents[3] / "models/tiny_flux"
NAME = "somebody/their-flux"
TOKEN = "hf_thisIsTheSecretToken"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a variant of Flux.1 schnell that has weights, too."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    configs = component_configs()
    index = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
    }
    repo = Repo()
    repo.commit(
        **{
            "model_index__json": json.dumps(index).encode(),
            "README__md": b"about it",
            "transformer/config__json": json.dumps(configs["flux1_schnell"]).encode(),
            "transformer/diffusion_pytorch_model__safetensors": b"weights",
            "text_encoder/config__json": json.dumps(configs["clip_l"]).encode(),
            "text_encoder/model__safetensors": b"weights",
            "text_encoder_2/config__json": json.dumps(configs["t5_xxl"]).encode(),
        }
    )
    with fake_hub() as served:
        served.repos[NAME] = repo
        yield served


def find(hub: FakeHub, cache: Path, name: str = NAME) -> Layout:
    return find_base(name, "BF16", functools.partial(fetch_configs, endpoint=hub.endpoint, cache_dir=cache))


def test_only_the_configs_are_downloaded(hub: FakeHub, tmp_path: Path):
    assert find(hub, tmp_path) == known_layout("flux.1-schnell", NAME, "BF16")
    files = {path.split("/resolve/")[1].partition("/")[2] for path in hub.paths("GET", "/resolve/")}
    assert files == {
        *("model_index.json", "transformer/config.json", "text_encoder/config.json", "text_encoder_2/config.json")
    }
    assert {token for _, _, token in hub.requests} == {f"Bearer {TOKEN}"}


def test_a_repository_that_was_asked_for_before_is_a_base_without_the_hub(hub: FakeHub, tmp_path: Path):
    first = find(hub, tmp_path)
    hub.endpoint = "http://127.0.0.1:9"
    assert find(hub, tmp_path) == first


@pytest.mark.parametrize(("access", "error"), [(GATED, AdapterAccessDenied), (BROKEN, SourceUnavailable)])
def test_a_hub_that_refuses_is_told_apart(hub: FakeHub, tmp_path: Path, access: str, error: type[Exception]):
    hub.repos[NAME].access = access
    with pytest.raises(error) as refused:
        find(hub, tmp_path)
    assert TOKEN not in str(refused.value)


def test_a_repository_that_does_not_exist_is_refused_with_the_list_of_known_bases(hub: FakeHub, tmp_path: Path):
    with pytest.raises(InvalidRequest) as refused:
        find(hub, tmp_path, "somebody/nothing")
    assert refused.value.field == "base"
    assert "flux.1-dev" in refused.value.remedy


def test_a_repository_of_an_adapter_is_no_base(hub: FakeHub, tmp_path: Path):
    hub.repos["somebody/adapter"] = Repo()
    hub.repos["somebody/adapter"].commit(sketch__safetensors=b"numbers")
    with pytest.raises(InvalidRequest, match=r"no model_index\.json"):
        find(hub, tmp_path, "somebody/adapter")
    assert hub.paths("GET", "/resolve/") == []


def test_what_is_no_repository_name_is_refused(hub: FakeHub, tmp_path: Path):
    with pytest.raises(InvalidAdapterRef):
        find(hub, tmp_path, "some body/else")


@pytest.mark.e2e
def test_the_command_line_checks_a_file_for_a_repository(hub: FakeHub, tmp_path: Path):
    names = ["model_index.json", *(f"{part}/config.json" for part in ("transformer", "text_encoder", "text_encoder_2"))]
    hub.repos["somebody/tiny"] = Repo()
    hub.repos["somebody/tiny"].commit(
        **{name.replace(".", "__"): (TINY_FLUX / "base" / name).read_bytes() for name in names}
    )
    sketch = TINY_FLUX / "adapters/sketch.safetensors"
    command = [sys.executable, "-m", "adapter_store", "inspect", str(sketch), "--base", "somebody/tiny", "--json"]
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    settings = {"LORAPLEX_STORE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own, **settings})
    assert (done.returncode, json.loads(done.stdout)["applicable"]) == (0, True), done.stderr
    assert hub.paths("GET", "somebody/tiny/resolve/")
    assert TOKEN not in done.stdout + done.stderr
