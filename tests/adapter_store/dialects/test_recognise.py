"""What a refusal says about a file for another base model."""

import re

import pytest

from adapter_store.dialects.recognise import describe_family, family_of
from tests.adapter_store.dialects.bases import BASES, base, denoiser_modules
from tests.adapter_store.dialects.original_names import ORIGINAL_NAMES

FAMILIES = {
    "sd1": "Stable Diffusion 1 or 2",
    "sdxl": "SDXL",
    "sd3": "SD3",
    "flux": "Flux.1",
    "flux2": "Flux.2",
    "flux2-klein": "Flux.2",
    "qwen-image": "Qwen-Image",
    "z-image": "Z-Image",
    "wan": "Wan",
    "wan-i2v": "Wan",
    "hunyuan-video": "HunyuanVideo",
    "ltx": "LTX-Video",
    "ltx2": "LTX-Video",
}


def stems(name: str, spelling: str) -> list[str]:
    names = denoiser_modules(name) if spelling == "diffusers" or name not in ORIGINAL_NAMES else ORIGINAL_NAMES[name]()
    return [f"diffusion_model.{one}" for one in names]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("spelling", ["diffusers", "original"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_all_modules_is_recognised_in_every_naming(name: str, spelling: str, flat: bool):
    names = stems(name, spelling)
    if flat:
        names = [one.replace("diffusion_model.", "lora_unet_").replace(".", "_") for one in names]
    assert family_of(names) == FAMILIES[name]


@pytest.mark.parametrize("prefix", ["lora_unet_", "diffusion_model.", "lycoris_"])
def test_many_blocks_of_ltx_are_not_taken_for_sdxl(prefix: str):
    names = [f"{prefix}transformer_blocks.{index}.attn1.to_q" for index in range(28)]
    assert family_of(names) == "LTX-Video"


def test_attention_alone_is_named_alike_in_flux_and_hunyuan_video():
    names = [f"transformer.{one}" for one in denoiser_modules("flux") if ".attn." in one]
    assert family_of(names) == "Flux.1 or HunyuanVideo"


def test_names_that_several_families_have_are_said_to_be_of_all_of_them():
    assert family_of(["transformer.transformer_blocks.0.attn.to_q"]).startswith("Flux.1 or Flux.2 or SD3")


@pytest.mark.parametrize("names", [[], ["model.embed", "encoder.conv1"]])
def test_names_of_no_family_are_not_recognised(names: list[str]):
    assert family_of(names) == ""
    assert describe_family(names) == ""


@pytest.mark.parametrize("name", ["sd3", "qwen-image", "z-image", "wan", "hunyuan-video", "ltx"])
def test_the_candidate_that_fits_is_named_with_counts(name: str):
    candidates = {one: base(one) for one in BASES if one not in ("wan-i2v", "wan-vace", "wan2.2")}
    loaded = base("qwen-image" if name != "qwen-image" else "sd3")
    names = [*stems(name, "original"), "diffusion_model.NOPE"]
    text = describe_family(names, candidates, loaded)
    match = re.fullmatch(rf"(\d+) of (\d+) modules match {re.escape(name)}, (\d+) match {loaded.base_model}\.", text)
    assert match, text
    assert (int(match[1]), int(match[2])) == (len(names) - 1, len(names))
    assert int(match[3]) < int(match[1])


def test_of_two_candidates_with_the_same_names_the_one_with_enough_blocks_is_named():
    names = [f"lora_unet_double_blocks_{index}_img_attn_proj" for index in range(19)]
    candidates = {"flux-dev": base("flux-dev"), "tiny flux": base("flux")}
    assert describe_family(names, candidates) == "19 of 19 modules match flux-dev."
    assert describe_family(names[:2], candidates) == "2 of 2 modules match tiny flux."


def test_without_a_candidate_that_fits_the_family_is_guessed():
    text = describe_family(["lora_unet_blocks_0_self_attn_q", "NOPE"], {"flux": base("flux")}, base("flux"))
    assert text == "1 of 2 modules are named as in Wan."
