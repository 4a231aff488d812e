"""The rows of known-failures.md about names: every difference arrives where the trainer meant it, or is refused.

The number in a test's id is the row's. `_ROWS` gives for a file's pairs (name, out, in) the modules that they must
reach, one after the other by rows of B.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.errors import AdapterRejected
from loraplex.layout import Layout
from loraplex.pack_options import PackOptions
from tests.adapter_store.dialects.bases import base
from tests.adapter_store.samples import (
    Float64,
    Tensors,
    assert_equal,
    delta,
    dense,
    fit_adapter,
    kohya,
    numbers,
    pack_tensors,
    peft,
    write_adapter,
)

D = 32  # width of the small Flux, Flux.2, Qwen-Image and Z-Image
W = 24  # width of the small Wan, LTX-Video and SD3
CLIP_Q = "encoder.layers.0.self_attn.q_proj"
TE1 = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
SINGLE = "single_transformer_blocks"
SD1_K = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
REFINER_DEEP = "lora_unet_input_blocks_8_1_transformer_blocks_9_attn1_to_q"

Pairs = tuple[tuple[str, int, int, tuple[str, ...]], ...]

_ROWS: dict[str, tuple[str, Pairs]] = {
    "2: SimpleTuner's diffusers names": (
        "flux",
        (
            ("transformer.single_transformer_blocks.0.attn.to_q", D, D, ("single_transformer_blocks.0.attn.to_q",)),
        ),
    ),
    "4: split projections of Z-Image": (
        "z-image",
        (
            ("diffusion_model.layers.0.attention.to_q", D, D, ("layers.0.attention.to_q",)),
            ("diffusion_model.layers.0.attention.to_out.0", D, D, ("layers.0.attention.to_out.0",)),
            ("diffusion_model.layers.0.feed_forward.w1", 85, D, ("layers.0.feed_forward.w1",)),
        ),
    ),
    "6: a modulation of Z-Image": (
        "z-image",
        (("layers.0.adaLN_modulation.0", 4 * D, D, ("layers.0.adaLN_modulation.0",)),),
    ),
    "14: Qwen-Image without a prefix": (
        "qwen-image",
        (
            ("transformer_blocks.0.attn.add_q_proj", D, D, ("transformer_blocks.0.attn.add_q_proj",)),
            ("transformer_blocks.1.img_mod.1", 6 * D, D, ("transformer_blocks.1.img_mod.1",)),
        ),
    ),
    "19: peft's prefix on Flux.2": (
        "flux2",
        (("base_model.model.transformer_blocks.0.attn.to_q", D, D, ("transformer_blocks.0.attn.to_q",)),),
    ),
    "22: a doubled prefix": (
        "ltx",
        (("transformer.transformer.transformer_blocks.0.attn1.to_q", W, W, ("transformer_blocks.0.attn1.to_q",)),),
    ),
    "23: ComfyUI's prefix on Z-Image": (
        "z-image",
        (("diffusion_model.layers.1.attention.to_q", D, D, ("layers.1.attention.to_q",)),),
    ),
    "24: the output projection alone": (
        "sd3",
        (("transformer.transformer_blocks.0.attn.to_out.0", W, W, ("transformer_blocks.0.attn.to_out.0",)),),
    ),
    "26: kohya's Flux modules outside the blocks": (
        "flux",
        (
            ("lora_unet_double_blocks_0_img_attn_proj", D, D, ("transformer_blocks.0.attn.to_out.0",)),
            ("lora_unet_img_in", D, 8, ("x_embedder",)),
            ("lora_unet_txt_in", D, 20, ("context_embedder",)),
            ("lora_unet_time_in_in_layer", D, 256, ("time_text_embed.timestep_embedder.linear_1",)),
            ("lora_unet_vector_in_out_layer", D, D, ("time_text_embed.text_embedder.linear_2",)),
            ("lora_unet_guidance_in_out_layer", D, D, ("time_text_embed.guidance_embedder.linear_2",)),
        ),
    ),
    "27: kohya's final layer of Flux": ("flux", (("lora_unet_final_layer_linear", 8, D, ("proj_out",)),)),
    "29: BFL's names with peft's suffixes": (
        "flux",
        (("diffusion_model.double_blocks.0.img_attn.proj", D, D, ("transformer_blocks.0.attn.to_out.0",)),),
    ),
    "32: OneTrainer's underscored names": (
        "flux",
        (
            (f"lora_transformer_{SINGLE}_0_proj_mlp", 4 * D, D, (f"{SINGLE}.0.proj_mlp",)),
            ("lora_transformer_transformer_blocks_0_ff_net_0_proj", 4 * D, D, ("transformer_blocks.0.ff.net.0.proj",)),
            (f"lora_transformer_{SINGLE}_1_norm_linear", 3 * D, D, (f"{SINGLE}.1.norm.linear",)),
        ),
    ),
    "33: peft's prefix with diffusers names": (
        "flux",
        (("base_model.model.transformer_blocks.0.attn.to_out.0", D, D, ("transformer_blocks.0.attn.to_out.0",)),),
    ),
    "36: kohya's modulations of Flux.2": (
        "flux2",
        (
            ("lora_unet_double_stream_modulation_img_lin", 6 * D, D, ("double_stream_modulation_img.linear",)),
            ("lora_unet_single_stream_modulation_lin", 3 * D, D, ("single_stream_modulation.linear",)),
        ),
    ),
    "38: the fused qkv of Z-Image": (
        "z-image",
        (
            (
                "diffusion_model.layers.0.attention.qkv",
                3 * D,
                D,
                ("layers.0.attention.to_q", "layers.0.attention.to_k", "layers.0.attention.to_v"),
            ),
        ),
    ),
    "39: some layers of Wan": ("wan", (("lora_unet_blocks_1_self_attn_q", W, W, ("blocks.1.attn1.to_q",)),)),
    "40: some blocks of Flux": (
        "flux",
        (("lora_unet_single_blocks_1_linear2", D, 5 * D, ("single_transformer_blocks.1.proj_out",)),),
    ),
    "155: LTX-Video with kohya's suffixes": (
        "ltx",
        (("diffusion_model.transformer_blocks.0.attn1.to_q", W, W, ("transformer_blocks.0.attn1.to_q",)),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", _ROWS)
@pytest.mark.parametrize("naming", ["kohya", "peft"])
def test_what_others_lose_is_applied(tmp_path: Path, row: str, naming: str):
    name, pairs = _ROWS[row]
    tensors, expected = {}, {}
    for number, (stem, out, inputs, modules) in enumerate(pairs):
        made = kohya(stem, out, inputs, 4, 2, seed=number) if naming == "kohya" else peft(stem, out, inputs, 4, number)
        tensors |= made
        whole = delta(made, stem, 0.5 if naming == "kohya" else 1.0)
        for module, part in zip(modules, np.split(whole, len(modules)), strict=True):
            expected[f"transformer.{module}"] = part
    assert_equal(pack_tensors(tmp_path, base(name), tensors), expected)


def test_18_xlabs_single_block_has_q_k_and_v_of_linear1_alone(tmp_path: Path):
    stem = "single_blocks.0.processor.qkv_lora"
    down, up = numbers(4, D), numbers(3 * D, 4, seed=1)
    got = pack_tensors(tmp_path, base("flux"), {f"{stem}.down.weight": down, f"{stem}.up.weight": up})
    whole = up.double().numpy() @ down.double().numpy()
    names = [f"transformer.single_transformer_blocks.0.attn.to_{one}" for one in "qkv"]
    assert_equal(got, dict(zip(names, np.split(whole, 3), strict=True)))


def test_35_first_generation_names_need_no_prefix(tmp_path: Path):
    block = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
    tensors: Tensors = {}
    for number, layer in enumerate(("to_q_lora", "to_out_lora")):
        tensors[f"{block}.processor.{layer}.down.weight"] = numbers(4, 16, seed=number)
        tensors[f"{block}.processor.{layer}.up.weight"] = numbers(16, 4, seed=number + 9)
    expected: dict[str, Float64] = {}
    for layer, ours in (("to_q_lora", "to_q"), ("to_out_lora", "to_out.0")):
        up, down = (tensors[f"{block}.processor.{layer}.{one}.weight"].double().numpy() for one in ("up", "down"))
        expected[f"unet.{block}.{ours}"] = up @ down
    assert_equal(pack_tensors(tmp_path, base("sd1"), tensors), expected)


@pytest.mark.parametrize(
    "stem", ["lora_te1_text_model_encoder_layers_0_self_attn_q_proj", f"clip_l.text_model.{CLIP_Q}"]
)
def test_8_9_10_the_text_encoders_part_of_a_flux_file_is_applied(tmp_path: Path, stem: str):
    unet = "lora_unet_double_blocks_0_img_attn_proj"
    tensors = kohya(stem, W, W, 4, 4) | kohya(unet, D, D, 4, 4)
    expected = {"transformer.transformer_blocks.0.attn.to_out.0": delta(tensors, unet)}
    assert_equal(
        pack_tensors(tmp_path, base("flux"), tensors), expected | {f"text_encoder.{CLIP_Q}": delta(tensors, stem)}
    )


def test_9_without_that_encoder_the_file_is_refused_unless_the_caller_waives_it(tmp_path: Path):
    layout = Layout(
        "flux", "FluxPipeline", "F32", tuple(m for m in base("flux").modules if m.component == "transformer")
    )
    unet = "lora_unet_double_blocks_0_img_attn_proj"
    tensors = kohya(TE1, W, W, 4, 4) | kohya(unet, D, D, 4, 4)
    path = write_adapter(tmp_path / "a.safetensors", tensors)
    assert refused(tmp_path, layout, tensors).cause == "COMPONENT_NOT_SERVED"
    fitted = fit_adapter(path, layout, options=PackOptions(waived=("text_encoder",)))
    assert list(dense(fitted.packed)) == ["transformer.transformer_blocks.0.attn.to_out.0"]


@pytest.mark.parametrize(
    ("row", "stem", "name"),
    [
        (3, "lycoris_transformer_blocks_0_attn_to_q", "flux"),
        (7, "layers.0.attention.to_q", "z-image"),
        (7, "diffusion_model.double_blocks.0.img_attn.proj", "flux2"),
    ],
)
def test_lokr_is_applied_under_every_prefix(tmp_path: Path, row: int, stem: str, name: str):
    first, second = numbers(4, 4), numbers(8, 8, seed=row)
    tensors = {f"{stem}.lokr_w1": first, f"{stem}.lokr_w2": second, f"{stem}.alpha": torch.tensor(1.0)}
    got = pack_tensors(tmp_path, base(name), tensors)
    assert_equal(got, {next(iter(got)): np.kron(first.double().numpy(), second.double().numpy())}, 1e-5)


def refused(folder: Path, layout: Layout, tensors: Tensors) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as error:
        pack_tensors(folder, layout, tensors)
    return error.value


GOOD = peft("transformer.transformer_blocks.0.attn.to_q", D, D, 4)


@pytest.mark.parametrize(
    ("row", "name", "tensors", "cause", "words"),
    [
        (1, "wan", kohya("lora_unet_blocks_0_self_attn_q_proj", W, W, 4, 2), "UNKNOWN_MODULE", "WanPipeline"),
        (1, "flux", kohya("lora_unet_blocks_0_self_attn_q_proj", D, D, 4, 2), "UNKNOWN_MODULE", "named as in Wan"),
        (13, "qwen-image", kohya("lora_unet_blocks_0_self_attn_q", D, D, 4, 4), "UNKNOWN_MODULE", "1 of 1 modules"),
        (21, "ltx", peft("diffusion_model.connectors.audio_connector.attn1.to_q", W, W, 4), "COMPONENT_NOT_SERVED", ""),
        (22, "wan", peft("sometool.blocks.0.self_attn.q", W, W, 4), "UNKNOWN_MODULE", "prefixes known here"),
        (29, "flux", peft("unet.down_blocks.0.attentions.0.proj_in", D, D, 4), "COMPONENT_NOT_SERVED", "match sd-1.5"),
        (30, "flux", GOOD | peft("transformer.transformer_blocks.0.attn.NOPE", D, D, 4), "UNKNOWN_MODULE", "NOPE"),
        (45, "sd1", kohya("lora_te_text_model_encoder_layers_0_NOPE", W, W, 4, 4), "UNKNOWN_MODULE", "NOPE"),
        (120, "sdxl", kohya("lora_unet_down_blocks_0_attentions_0_proj_in", 8, 8, 4), "UNKNOWN_MODULE", "_0_proj_in"),
        (120, "sdxl-refiner", kohya(REFINER_DEEP, 24, 24, 4), "UNKNOWN_MODULE", "sdxl-base-1.0"),
        (120, "sd1", kohya(SD1_K, 16, 20, 4), "SHAPE_MISMATCH", "widths"),
        (124, "flux", kohya("lora_unet_double_blocks_18_img_attn_proj", D, D, 4), "UNKNOWN_MODULE", "blocks_18"),
        (156, "ltx", peft("text_embedding_projection.aggregate_embed", W, W, 4), "COMPONENT_NOT_SERVED", ""),
        (97, "wan2.2", kohya("lora_unet_blocks_0_self_attn_q", W, W, 4), "AMBIGUOUS_COMPONENT", "transformer_2"),
    ],
)  # fmt: skip
def test_what_fits_no_module_is_refused_with_the_first_bad_key(
    tmp_path: Path, row: int, name: str, tensors: Tensors, cause: str, words: str
):
    error = refused(tmp_path, base(name), tensors)
    assert error.cause == cause
    assert error.key in tensors
    assert words in error.message
    assert error.remedy


@pytest.mark.parametrize("denoiser", ["transformer", "transformer_2"])
def test_97_the_caller_names_the_transformer_of_wan_2_2(tmp_path: Path, denoiser: str):
    stem = "diffusion_model.blocks.0.cross_attn.o"
    tensors = kohya(stem, W, W, 4, 2)
    path = write_adapter(tmp_path / "a.safetensors", tensors)
    fitted = fit_adapter(path, base("wan2.2"), options=PackOptions(denoiser=denoiser))
    assert_equal(dense(fitted.packed), {f"{denoiser}.blocks.0.attn2.to_out.0": delta(tensors, stem, 0.5)})


@pytest.mark.parametrize("stem", ["diffusion_model.single_blocks.0.linear1", "lora_unet_single_blocks_0_linear1"])
def test_pieces_of_flux2s_fused_projection_are_composed(tmp_path: Path, stem: str):
    """k and the MLP of a module of rows q, k, v and six of MLP: the rest of its difference is zero."""
    mark = "." if stem.startswith("diff") else "_"
    k, mlp = f"{stem}{mark}1", f"{stem}{mark}3"
    tensors = kohya(k, D, D, 4, 2) | kohya(mlp, 6 * D, D, 4, 4, seed=5)
    zero = np.zeros((D, D))
    whole = np.concatenate([zero, delta(tensors, k, 0.5), zero, delta(tensors, mlp)])
    got = pack_tensors(tmp_path, base("flux2"), tensors)
    assert_equal(got, {"transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj": whole})


def test_a_duplicate_fused_qkv_beside_its_parts_counts_once_when_it_is_equal(tmp_path: Path):
    """Anime-Z writes both; a copy that differs is refused."""
    block = "layers.0.attention"
    fused = kohya(f"{block}.qkv", 3 * D, D, 4)
    parts: Tensors = {}
    for number, one in enumerate("qkv"):
        parts[f"{block}.to.{one}.lora.down.weight"] = fused[f"{block}.qkv.lora_down.weight"]
        parts[f"{block}.to.{one}.lora.up.weight"] = fused[f"{block}.qkv.lora_up.weight"][number * D : (number + 1) * D]
    got = pack_tensors(tmp_path, base("z-image"), fused | parts)
    whole = np.split(delta(fused, f"{block}.qkv"), 3)
    names = [f"transformer.{block}.to_{one}" for one in "qkv"]
    assert_equal(got, dict(zip(names, whole, strict=True)))
    parts[f"{block}.to.k.lora.up.weight"] = numbers(D, 4, seed=77)
    assert refused(tmp_path, base("z-image"), fused | parts).cause == "DUPLICATE_MODULE"
