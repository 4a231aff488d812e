"""Which text encoder and which denoiser a name means: formats.md 3.9, and the models with two transformers."""

import pytest

from adapter_store.dialects.names import Names
from adapter_store.dialects.prefixes import split_prefix
from loraplex.errors import AdapterRejected, InvalidRequest
from loraplex.layout import Layout
from tests.adapter_store.dialects.bases import base

CLIP = "encoder.layers.1.self_attn.q_proj"
T5 = "encoder.block.1.layer.0.SelfAttention.q"
LLM = "layers.1.self_attn.q_proj"


def flat(path: str) -> str:
    return path.replace(".", "_")


def path(layout: Layout, stem: str, denoiser: str = "") -> str:
    (share,) = Names(layout, denoiser).find(split_prefix(stem), stem).shares
    return layout.modules[share.module].path


def cause(layout: Layout, stem: str, denoiser: str = "") -> str:
    with pytest.raises(AdapterRejected) as refused:
        Names(layout, denoiser).find(split_prefix(stem), stem)
    return refused.value.cause


@pytest.mark.parametrize(
    ("name", "stem", "component"),
    [
        # kohya and OneTrainer
        ("sd1", f"lora_te_text_model_{flat(CLIP)}", "text_encoder"),
        ("sd2", f"lora_te1_text_model_{flat(CLIP)}", "text_encoder"),
        ("sdxl", f"lora_te1_text_model_{flat(CLIP)}", "text_encoder"),
        ("sdxl", f"lora_te2_text_model_{flat(CLIP)}", "text_encoder_2"),
        ("sdxl-refiner", f"lora_te2_text_model_{flat(CLIP)}", "text_encoder_2"),
        ("sd3", f"lora_te1_text_model_{flat(CLIP)}", "text_encoder"),
        ("sd3", f"lora_te2_text_model_{flat(CLIP)}", "text_encoder_2"),
        ("sd3", f"lora_te3_{flat(T5)}", "text_encoder_3"),
        ("flux", f"lora_te1_text_model_{flat(CLIP)}", "text_encoder"),
        ("flux", f"lora_te3_{flat(T5)}", "text_encoder_2"),
        ("flux", f"lora_te2_{flat(T5)}", "text_encoder_2"),
        ("hunyuan-video", f"lora_te1_{flat(LLM)}", "text_encoder"),
        ("hunyuan-video", f"lora_te1_model_{flat(LLM)}", "text_encoder"),
        ("hunyuan-video", f"lora_te2_text_model_{flat(CLIP)}", "text_encoder_2"),
        ("z-image", f"lora_te_model_{flat(LLM)}", "text_encoder"),
        ("wan", f"lora_te_{flat(T5)}", "text_encoder"),
        ("qwen-image", f"lora_te_{flat(LLM)}", "text_encoder"),
        ("qwen-image", f"lora_te_model_language_model_{flat(LLM)}", "text_encoder"),
        ("qwen-image", f"text_encoders.qwen25_7b.transformer.model.{LLM}", "text_encoder"),
        ("flux2", f"text_encoders.mistral3_24b.transformer.model.{LLM}", "text_encoder"),
        # ComfyUI and OneTrainer's own names
        ("sdxl", f"text_encoders.clip_l.transformer.text_model.{CLIP}", "text_encoder"),
        ("sdxl", f"text_encoders.clip_g.transformer.text_model.{CLIP}", "text_encoder_2"),
        ("sdxl", f"clip_l.text_model.{CLIP}", "text_encoder"),
        ("sdxl", f"clip_g.text_model.{CLIP}", "text_encoder_2"),
        ("sd3", f"text_encoders.clip_g.transformer.text_model.{CLIP}", "text_encoder_2"),
        ("sd3", f"text_encoders.t5xxl.transformer.{T5}", "text_encoder_3"),
        ("flux", f"text_encoders.t5xxl.transformer.{T5}", "text_encoder_2"),
        ("flux", f"t5.{T5}", "text_encoder_2"),
        ("hunyuan-video", f"text_encoders.clip_l.transformer.text_model.{CLIP}", "text_encoder_2"),
        ("hunyuan-video", f"text_encoders.llama.transformer.model.{LLM}", "text_encoder"),
        ("hunyuan-video", f"llama.model.{LLM}", "text_encoder"),
        ("z-image", f"text_encoders.qwen3_4b.transformer.model.{LLM}", "text_encoder"),
        ("flux2-klein", f"text_encoders.qwen3_4b.transformer.model.{LLM}", "text_encoder"),
        ("ltx", f"text_encoders.t5xxl.transformer.{T5}", "text_encoder"),
        # diffusers
        ("sdxl", f"text_encoder_2.{CLIP}", "text_encoder_2"),
        ("sdxl", f"text_encoder.text_model.{CLIP}", "text_encoder"),
        ("sd1", f"text_encoder.text_model.{CLIP.replace('q_proj', 'to_q_lora')}", "text_encoder"),
        ("z-image", f"text_encoder.model.{LLM}", "text_encoder"),
        # peft's own file of a text encoder alone
        ("sd1", f"base_model.model.text_model.{CLIP}", "text_encoder"),
    ],
)
def test_the_text_encoder_is_found(name: str, stem: str, component: str):
    found = path(base(name), stem)
    assert found.startswith(f"{component}.")
    assert found.endswith((CLIP, T5, LLM))


@pytest.mark.parametrize("layer", ["self_attn.to_q_lora", "self_attn.to_out_lora", "self_attn.out_proj", "mlp.fc2"])
def test_clip_is_read_with_the_names_of_first_generation_diffusers(layer: str):
    ours = {"self_attn.to_q_lora": "self_attn.q_proj", "self_attn.to_out_lora": "self_attn.out_proj"}.get(layer, layer)
    assert path(base("sd1"), f"text_encoder.text_model.encoder.layers.0.{layer}").endswith(f"layers.0.{ours}")


@pytest.mark.parametrize(
    "stem", ["lora_te2_text_projection", "text_encoder_2.text_projection", "clip_g.text_projection"]
)
def test_the_text_projection_of_sdxl_is_a_module(stem: str):
    assert path(base("sdxl"), stem) == "text_encoder_2.text_projection"


@pytest.mark.parametrize("stem", ["lora_te1_text_projection", "text_encoders.clip_l.transformer.text_projection"])
def test_a_text_projection_that_the_encoder_lacks_is_not_looked_for_in_another(stem: str):
    for name in ("sdxl", "flux"):
        assert cause(base(name), stem) == "COMPONENT_NOT_SERVED"


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("sdxl-refiner", f"lora_te1_text_model_{flat(CLIP)}"),
        ("sdxl-refiner", f"text_encoders.clip_l.transformer.text_model.{CLIP}"),
        ("sdxl", f"lora_te3_{flat(T5)}"),
        ("sdxl", f"lora_te3_text_model_{flat(CLIP)}"),
        ("flux-dev", f"lora_te1_text_model_{flat(CLIP)}"),
        ("flux-dev", f"text_encoder.{CLIP}"),
        ("wan", f"lora_te_text_model_{flat(CLIP)}"),
    ],
)
def test_an_encoder_that_the_layout_lacks_is_not_served_by_another(name: str, stem: str):
    assert cause(base(name), stem) == "COMPONENT_NOT_SERVED"


def test_clip_without_a_component_is_ambiguous_where_there_are_two():
    assert cause(base("sdxl"), f"text_model.{CLIP}") == "AMBIGUOUS_COMPONENT"


@pytest.mark.parametrize("stem", ["lora_te1_text_model_encoder_layers_9_self_attn_q_proj", "lora_te1_text_model_NOPE"])
def test_a_module_that_the_encoder_lacks_is_unknown(stem: str):
    assert cause(base("sdxl"), stem) == "UNKNOWN_MODULE"


TWO = ("transformer", "transformer_2")
IMPLICIT = (
    "blocks.0.self_attn.q",
    "diffusion_model.blocks.0.self_attn.q",
    "lora_unet_blocks_0_self_attn_q",
    "base_model.model.blocks.0.attn1.to_q",
)


@pytest.mark.parametrize("stem", IMPLICIT)
def test_of_two_denoisers_the_caller_must_name_one(stem: str):
    with pytest.raises(AdapterRejected, match="transformer or transformer_2") as refused:
        Names(base("wan2.2")).find(split_prefix(stem), stem)
    assert refused.value.cause == "AMBIGUOUS_COMPONENT"


@pytest.mark.parametrize("denoiser", TWO)
@pytest.mark.parametrize("stem", IMPLICIT)
def test_the_named_denoiser_is_adapted(stem: str, denoiser: str):
    assert path(base("wan2.2"), stem, denoiser) == f"{denoiser}.blocks.0.attn1.to_q"


@pytest.mark.parametrize("component", TWO)
def test_a_component_in_the_file_names_the_denoiser(component: str):
    stem = f"{component}.blocks.0.attn1.to_q"
    assert path(base("wan2.2"), stem) == stem
    assert path(base("wan2.2"), stem, component) == stem


def test_transformer_is_what_diffusers_calls_either_denoiser():
    """Its `load_lora_weights(load_into_transformer_2=True)` takes a file that says `transformer.` too."""
    stem = "transformer.blocks.0.attn1.to_q"
    assert path(base("wan2.2"), stem, "transformer_2") == "transformer_2.blocks.0.attn1.to_q"


def test_a_component_that_contradicts_the_caller_is_refused():
    stem = "transformer_2.blocks.0.attn1.to_q"
    with pytest.raises(AdapterRejected, match="the caller asked for transformer") as refused:
        Names(base("wan2.2"), "transformer").find(split_prefix(stem), stem)
    assert refused.value.cause == "COMPONENT_NOT_SERVED"


@pytest.mark.parametrize("denoiser", ["unet", "transformer_3", "text_encoder"])
def test_a_denoiser_that_the_layout_lacks_is_a_wrong_request(denoiser: str):
    with pytest.raises(InvalidRequest) as refused:
        Names(base("wan2.2"), denoiser)
    assert refused.value.field == "denoiser"


def test_text_encoders_are_found_beside_a_named_denoiser():
    assert path(base("wan2.2"), f"text_encoder.{T5}", "transformer_2") == f"text_encoder.{T5}"
