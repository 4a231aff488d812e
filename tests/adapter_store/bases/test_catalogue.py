"""The well-known bases: layouts without weights, right by what is published about them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from adapter_store.bases import candidates, find_base, known_bases, known_layout
from adapter_store.bases.catalogue import OUTLINES, component_configs
from adapter_store.bases.outline import read_outline, write_outline
from loraplex.errors import InvalidRequest

# As others counted them, mostly on the checkpoints; see SOURCES.md. SD3's position table is a buffer in diffusers.
COUNTED = {
    "sd15_unet": 859_520_964,
    "sd21_unet": 865_910_724,
    "sdxl_unet": 2_567_463_684,
    "sdxl_refiner_unet": 2_259_526_660,
    "sd3_medium": 2_028_328_000,
    "sd35_medium": 2_469_663_936 - 384 * 384 * 1536,
    "sd35_large": 16_292_561_536 // 2 - 192 * 192 * 2432,
    "flux1_dev": 23_802_816_640 // 2,
    "flux1_schnell": 23_782_357_120 // 2,
    "flux1_fill": 11_902_391_360,
    "flux2_dev": 32_223_281_152,
    "flux2_klein_4b": 3_875_544_576,
    "flux2_klein_9b": 9_078_581_248,
    "qwen_image": 40_860_802_176 // 2,
    "z_image": 12_309_817_472 // 2,
    "wan_14b": 14_288_491_584,
    "wan_1_3b": 1_418_996_800,
    "wan21_i2v_14b": 16_394_878_784,
    "wan22_i2v_14b": 14_288_901_184,
    "wan22_5b": 4_999_787_712,
    "hunyuan_video": 12_821_012_544,
    "ltx_video": 1_923_385_472,
    "clip_l": 123_060_480,
    "clip_l_projection": 123_650_304,
    "openclip_h": 340_387_840,
    "openclip_g": 694_659_840,
    "t5_xxl": 4_762_310_656,
}


def nothing(repository: str) -> Path:
    raise AssertionError(f"{repository} must not be fetched")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(component_configs()))
def test_an_outline_is_what_diffusers_builds_from_its_config(name: str):
    from adapter_store.bases.build import build_component

    built = build_component("", component_configs()[name])
    text = (OUTLINES / f"{name}.txt").read_text()
    assert text == write_outline(built), "run `python -m adapter_store.bases`"
    assert read_outline(text, "") == built


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(component_configs()))
def test_a_config_has_exactly_as_many_parameters_as_others_counted(name: str):
    from adapter_store.bases.build import build_model

    model = build_model(component_configs()[name])
    assert sum(one.numel() for one in model.parameters()) == COUNTED[name]


def test_every_base_has_its_outlines_and_is_found_by_every_name():
    for name, base in known_bases().items():
        for spelling in (name, *base["hub"]):
            for text in (spelling, spelling.upper()):
                layout = find_base(text, "BF16", nothing)
                assert (layout.base_model, layout.family) == (spelling, base["family"])
                assert len(layout.modules) > 100
                assert {module.component for module in layout.modules} == set(base["components"])


def test_no_two_bases_share_a_name_and_each_says_what_it_is():
    spellings = [one.lower() for name, base in known_bases().items() for one in (name, *base["hub"])]
    assert len(set(spellings)) == len(spellings)
    assert all(base["about"] for base in known_bases().values())


def test_the_candidates_are_the_layouts_of_all_bases():
    assert list(candidates()) == list(known_bases())
    for name, layout in candidates().items():
        assert layout == find_base(name, "BF16", nothing)


def test_flux_dev_has_the_modules_that_its_architecture_counts():
    modules = known_layout("flux.1-dev", "flux.1-dev", "BF16").modules
    in_blocks = [one for one in modules if one.component == "transformer" and "transformer_blocks." in one.name]
    assert len(in_blocks) == 494


def write_folder(folder: Path, family: str, **parts: tuple[str, str, object]) -> Path:
    """A diffusers folder: of each component its library, its class, and its config, None for none."""
    index = {"_class_name": family, "vae": [None, None], **{name: [*part[:2]] for name, part in parts.items()}}
    (folder / "model_index.json").write_text(json.dumps(index))
    for name, (_, _, config) in parts.items():
        if config is not None:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["sd-1.5", "sdxl-refiner-1.0", "sd3.5-medium", "flux.1-fill-dev", "wan2.2-ti2v-5b"])
def test_the_folder_of_a_well_known_base_has_its_layout(tmp_path: Path, name: str):
    base, configs = known_bases()[name], component_configs()
    parts = {component: configs[config] for component, config in base["components"].items()}
    written = {
        component: ("diffusers", config["_class_name"], config)
        if "_class_name" in config
        else ("transformers", config["architectures"][0], config)
        for component, config in parts.items()
    }
    folder = write_folder(tmp_path, base["family"], **written)
    assert find_base(str(folder), "F32", nothing) == known_layout(name, str(folder), "F32")


def test_the_classes_are_those_of_the_index_as_for_diffusers(tmp_path: Path):
    configs = component_configs()
    unet = {**configs["sd21_unet"], "_class_name": "FlaxUNet2DConditionModel"}  # as mirrors of SD 2.1 have it
    whole_clip = {"architectures": ["CLIPModel"], "model_type": "clip", "text_config": configs["openclip_h"]}
    folder = write_folder(
        tmp_path,
        "StableDiffusionPipeline",
        unet=("diffusers", "UNet2DConditionModel", unet),
        text_encoder=("transformers", "CLIPTextModel", whole_clip),
    )
    assert find_base(str(folder), "BF16", nothing).modules == known_layout("sd-2.1", "sd-2.1", "BF16").modules


def test_a_family_whose_text_encoders_nobody_adapts_needs_no_config_of_them(tmp_path: Path):
    unread = ("transformers", "Qwen3ForCausalLM", None)
    denoiser = ("diffusers", "ZImageTransformer2DModel", component_configs()["z_image"])
    folder = write_folder(tmp_path, "ZImagePipeline", transformer=denoiser, text_encoder=unread)
    assert find_base(str(folder), "BF16", nothing).modules == known_layout("z-image", "z-image", "BF16").modules


@pytest.mark.parametrize("text", ["flux", "", "no/such/folder", "sd-1.5 "])
def test_an_unknown_base_is_refused_with_the_list_of_known_ones(text: str):
    with pytest.raises(InvalidRequest) as refused:
        find_base(text, "BF16", nothing)
    assert "flux.1-dev" in refused.value.remedy


UNET = '{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}'


@pytest.mark.parametrize(
    ("index", "config", "word"),
    [
        ("no json", "{}", "model_index.json cannot be read"),
        ("[]", "{}", "model_index.json is no JSON object"),
        ("[" * 100_000, "{}", "model_index.json cannot be read"),
        ('{"_class_name": "P"}', "{}", "names no component"),
        ('{"_class_name": "P", "unet": [null, null]}', "{}", "names no component"),
        ('{"_class_name": "P", "unet": ["their_code", "U"]}', "{}", "their_code"),
        ('{"_class_name": "P", "unet": ["diffusers", "NoSuchModel"]}', "{}", "NoSuchModel"),
        ('{"_class_name": "P", "unet": ["diffusers", "logging"]}', "{}", "logging"),
        ('{"_class_name": "P", "unet": ["transformers", "pipeline"]}', "{}", "pipeline"),
        ('{"_class_name": "P", "transformer": ["diffusers", "FluxTransformer2DModel"]}', "{}", "no transformer/config"),
        (UNET, "no json", "unet/config.json cannot be read"),
        (UNET, '{"block_out_channels": 7}', "UNet2DConditionModel cannot be built"),
        (UNET, '{"norm_num_groups": 0}', "UNet2DConditionModel cannot be built"),
        (UNET.replace("}", ', "text_encoder": ["transformers", "CLIPTextModel"]}'), "{}", "no text_encoder/config"),
        (UNET.replace("}", ', "text_encoder_x/../..": ["transformers", "CLIPTextModel"]}'), "[]", "unet/config.json"),
    ],
)
def test_a_folder_that_describes_no_model_is_refused(tmp_path: Path, index: str, config: str, word: str):
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text(index)
    (tmp_path / "unet" / "config.json").write_text(config)
    with pytest.raises(InvalidRequest) as refused:
        find_base(str(tmp_path), "BF16", nothing)
    assert word in refused.value.message
    assert "flux.1-dev" in refused.value.remedy


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InvalidRequest) as refused:
        find_base("sd-1.5", "F8", nothing)
    assert refused.value.field == "dtype"


def test_a_well_known_base_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from adapter_store.bases import find_base; "
        "print(len(find_base('sdxl-base-1.0', 'BF16', None).modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 900
