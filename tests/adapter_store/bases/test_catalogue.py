"""The well-known bases: layouts without weights, right by what is published about them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from adapter_store.bases import find_base, known_bases, known_layout
from adapter_store.bases.catalogue import OUTLINES, component_configs
from adapter_store.bases.outline import write_outline
from loraplex.errors import InvalidRequest

# Parameters in billions, as published; see SOURCES.md. The position table of SD3 is a buffer in diffusers.
PUBLISHED = {
    "sd15_unet": 0.8595,
    "sd21_unet": 0.8659,
    "sdxl_unet": 2.567,
    "sdxl_refiner_unet": 2.26,
    "sd3_medium": 2.03,
    "sd35_medium": 2.24,
    "sd35_large": 8.06,
    "flux1_dev": 11.90,
    "flux1_schnell": 11.89,
    "flux1_fill": 11.90,
    "flux2_dev": 32.2,
    "flux2_klein_4b": 3.88,
    "flux2_klein_9b": 9.08,
    "qwen_image": 20.43,
    "z_image": 6.15,
    "wan_14b": 14.29,
    "wan_1_3b": 1.42,
    "wan21_i2v_14b": 16.4,
    "wan22_i2v_14b": 14.29,
    "wan22_5b": 5.0,
    "hunyuan_video": 12.82,
    "ltx_video": 1.92,
    "clip_l": 0.123,
    "clip_l_projection": 0.1237,
    "openclip_h": 0.3404,
    "openclip_g": 0.6947,
    "t5_xxl": 4.762,
}


def nothing(repository: str) -> Path:
    raise AssertionError(f"{repository} must not be fetched")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(component_configs()))
def test_an_outline_is_what_diffusers_builds_from_its_config(name: str):
    from adapter_store.bases.build import build_component

    fresh = write_outline(build_component("", component_configs()[name]))
    assert (OUTLINES / f"{name}.txt").read_text() == fresh, "run `python -m adapter_store.bases`"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(component_configs()))
def test_a_config_has_as_many_parameters_as_the_model_is_published_with(name: str):
    from adapter_store.bases.build import build_model

    model = build_model(component_configs()[name])
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(1e9 * PUBLISHED[name], rel=0.01)


def test_every_base_has_its_outlines_and_is_found_by_every_name():
    for name, base in known_bases().items():
        for text in (name, name.upper(), *base["hub"]):
            layout = find_base(text, "BF16", nothing)
            assert (layout.base_model, layout.family) == (text, base["family"])
            assert len(layout.modules) > 100
            assert {module.component for module in layout.modules} == set(base["components"])


def test_flux_dev_has_the_modules_that_its_architecture_counts():
    modules = known_layout("flux.1-dev", "flux.1-dev", "BF16").modules
    in_blocks = [one for one in modules if one.component == "transformer" and "transformer_blocks." in one.name]
    assert len(in_blocks) == 494


def test_a_local_folder_is_a_base(tmp_path: Path):
    (tmp_path / "unet").mkdir()
    config = component_configs()["sd15_unet"]
    (tmp_path / "unet" / "config.json").write_text(json.dumps(config))
    index = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": [None, None],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    layout = find_base(str(tmp_path), "F32", nothing)
    known = known_layout("sd-1.5", "sd-1.5", "F32")
    assert layout.modules == tuple(module for module in known.modules if module.component == "unet")


def test_a_hub_repository_is_a_base_by_its_configs_alone(tmp_path: Path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", "transformer": ["d", "F"]}))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(component_configs()["flux1_schnell"]))
    asked: list[str] = []

    def fetch(repository: str) -> Path:
        asked.append(repository)
        return tmp_path

    layout = find_base("somebody/their-flux", "BF16", fetch)
    assert asked == ["somebody/their-flux"]
    assert (layout.base_model, len(layout.modules)) == ("somebody/their-flux", 502)


@pytest.mark.parametrize("text", ["flux", "", "no/such/folder", "sd-1.5 "])
def test_an_unknown_base_is_refused_with_the_list_of_known_ones(text: str):
    with pytest.raises(InvalidRequest) as refused:
        find_base(text, "BF16", nothing)
    assert "flux.1-dev" in refused.value.remedy


@pytest.mark.parametrize(
    ("index", "config"),
    [
        ("no json", "{}"),
        ("[]", "{}"),
        ('{"_class_name": "P", "unet": ["d", "U"]}', "no json"),
        ('{"_class_name": "P", "unet": ["d", "U"]}', '{"_class_name": "NoSuchModel"}'),
        (
            '{"_class_name": "P", "unet": ["d", "U"]}',
            '{"_class_name": "UNet2DConditionModel", "block_out_channels": 7}',
        ),
        ('{"_class_name": "P"}', "{}"),
    ],
)
def test_a_folder_that_describes_no_model_is_refused(tmp_path: Path, index: str, config: str):
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text(index)
    (tmp_path / "unet" / "config.json").write_text(config)
    with pytest.raises(InvalidRequest):
        find_base(str(tmp_path), "BF16", nothing)


def test_a_well_known_base_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from adapter_store.bases import find_base; "
        "print(len(find_base('sdxl-base-1.0', 'BF16', None).modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 900
