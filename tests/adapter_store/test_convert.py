"""Every naming leads to the same numbers: the packed rows against a dense fp64 oracle."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.errors import AdapterRejected
from tests.adapter_store.samples import (
    WIDTH,
    Tensors,
    assert_equal,
    delta,
    flux_layout,
    kohya,
    numbers,
    pack_file,
    pack_tensors,
    peft,
    unet_layout,
    write_adapter,
)

TO_Q = "transformer_blocks.0.attn.to_q"
FF = "transformer.transformer_blocks.0.ff.net.2"
CLIP_Q = "encoder.layers.0.self_attn.q_proj"
T5_Q = "encoder.block.0.layer.0.SelfAttention.q"


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "transformer.",
        "diffusion_model.",
        "model.diffusion_model.",
        "base_model.model.",
        "base_model.model.transformer.",
        "base_model.model.diffusion_model.",
        "transformer.transformer.",
    ],
)
def test_dotted_names_are_read_with_every_prefix(tmp_path: Path, prefix: str):
    tensors = peft(f"{prefix}{TO_Q}", WIDTH, WIDTH, 4)
    got = pack_tensors(tmp_path, flux_layout(), tensors)
    assert_equal(got, {f"transformer.{TO_Q}": delta(tensors, f"{prefix}{TO_Q}")})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("lora_A.weight", "lora_B.weight"),
        ("lora_A.default.weight", "lora_B.default.weight"),
        ("lora_A.style.weight", "lora_B.style.weight"),
        ("lora_A", "lora_B"),
        ("lora_down.weight", "lora_up.weight"),
        ("lora.down.weight", "lora.up.weight"),
    ],
)
def test_every_spelling_of_a_and_b_is_read(tmp_path: Path, a: str, b: str):
    A, B = numbers(4, WIDTH), numbers(WIDTH, 4, seed=1)
    got = pack_tensors(tmp_path, flux_layout(), {f"transformer.{TO_Q}.{a}": A, f"transformer.{TO_Q}.{b}": B})
    assert_equal(got, {f"transformer.{TO_Q}": B.double().numpy() @ A.double().numpy()})


@pytest.mark.parametrize(
    ("name", "module", "out", "inputs"),
    [
        ("lora_unet_double_blocks_0_img_attn_proj", "transformer_blocks.0.attn.to_out.0", WIDTH, WIDTH),
        ("lora_unet_double_blocks_0_txt_attn_proj", "transformer_blocks.0.attn.to_add_out", WIDTH, WIDTH),
        ("lora_unet_double_blocks_0_img_mlp_0", "transformer_blocks.0.ff.net.0.proj", 4 * WIDTH, WIDTH),
        ("lora_unet_double_blocks_0_img_mlp_2", "transformer_blocks.0.ff.net.2", WIDTH, 4 * WIDTH),
        ("lora_unet_double_blocks_0_txt_mlp_0", "transformer_blocks.0.ff_context.net.0.proj", 4 * WIDTH, WIDTH),
        ("lora_unet_double_blocks_0_txt_mlp_2", "transformer_blocks.0.ff_context.net.2", WIDTH, 4 * WIDTH),
        ("lora_unet_double_blocks_0_img_mod_lin", "transformer_blocks.0.norm1.linear", 6 * WIDTH, WIDTH),
        ("lora_unet_double_blocks_0_txt_mod_lin", "transformer_blocks.0.norm1_context.linear", 6 * WIDTH, WIDTH),
        ("lora_unet_single_blocks_0_linear2", "single_transformer_blocks.0.proj_out", WIDTH, 5 * WIDTH),
        ("lora_unet_single_blocks_0_modulation_lin", "single_transformer_blocks.0.norm.linear", 3 * WIDTH, WIDTH),
        ("lora_unet_img_in", "x_embedder", WIDTH, 4),
        ("lora_unet_txt_in", "context_embedder", WIDTH, 32),
        ("lora_unet_time_in_in_layer", "time_text_embed.timestep_embedder.linear_1", WIDTH, 256),
        ("lora_unet_time_in_out_layer", "time_text_embed.timestep_embedder.linear_2", WIDTH, WIDTH),
        ("lora_unet_vector_in_in_layer", "time_text_embed.text_embedder.linear_1", WIDTH, WIDTH),
        ("lora_unet_vector_in_out_layer", "time_text_embed.text_embedder.linear_2", WIDTH, WIDTH),
        ("lora_unet_guidance_in_in_layer", "time_text_embed.guidance_embedder.linear_1", WIDTH, 256),
        ("lora_unet_guidance_in_out_layer", "time_text_embed.guidance_embedder.linear_2", WIDTH, WIDTH),
        ("lora_unet_final_layer_linear", "proj_out", 4, WIDTH),
        ("lora_transformer_single_transformer_blocks_0_proj_mlp", "single_transformer_blocks.0.proj_mlp", 128, WIDTH),
        ("lycoris_transformer_blocks_0_ff_net_0_proj", "transformer_blocks.0.ff.net.0.proj", 4 * WIDTH, WIDTH),
        ("lora_unet__transformer_blocks_0_attn_to_k", "transformer_blocks.0.attn.to_k", WIDTH, WIDTH),
    ],
)
def test_underscored_names_lead_to_their_module_with_alpha(
    tmp_path: Path, name: str, module: str, out: int, inputs: int
):
    tensors = kohya(name, out, inputs, rank=4, alpha=1)
    got = pack_tensors(tmp_path, flux_layout(), tensors)
    assert_equal(got, {f"transformer.{module}": delta(tensors, name, 1 / 4)})


@pytest.mark.parametrize(
    "name", ["lora_unet_double_blocks_0_{}_attn_qkv", "diffusion_model.double_blocks.0.{}_attn.qkv"]
)
@pytest.mark.parametrize(
    ("stream", "modules"), [("img", ("to_q", "to_k", "to_v")), ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"))]
)
def test_a_fused_qkv_is_cut_by_rows(tmp_path: Path, name: str, stream: str, modules: tuple[str, ...]):
    name = name.format(stream)
    tensors = kohya(name, 3 * WIDTH, WIDTH, rank=4, alpha=8)
    expected = {
        f"transformer.transformer_blocks.0.attn.{module}": delta(
            tensors, name, 2.0, slice(part * WIDTH, (part + 1) * WIDTH)
        )
        for part, module in enumerate(modules)
    }
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), expected)


def single_block_parts(tensors: Tensors, name: str, scaling: float) -> dict[str, np.ndarray]:
    bounds = [0, WIDTH, 2 * WIDTH, 3 * WIDTH, 7 * WIDTH]
    modules = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
    return {
        f"transformer.single_transformer_blocks.0.{module}": delta(tensors, name, scaling, slice(start, stop))
        for module, start, stop in zip(modules, bounds, bounds[1:], strict=False)
    }


@pytest.mark.parametrize("name", ["lora_unet_single_blocks_0_linear1", "base_model.model.single_blocks.0.linear1"])
def test_linear1_is_cut_into_q_k_v_and_mlp(tmp_path: Path, name: str):
    tensors = kohya(name, 7 * WIDTH, WIDTH, rank=4, alpha=3)
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), single_block_parts(tensors, name, 3 / 4))


def test_pieces_of_linear1_that_onetrainer_cut_are_read(tmp_path: Path):
    name = "transformer.single_blocks.0.linear1"
    tensors = kohya(f"{name}.1", WIDTH, WIDTH, 4, 2) | kohya(f"{name}.3", 4 * WIDTH, WIDTH, 4, 2, seed=5)
    expected = {
        "transformer.single_transformer_blocks.0.attn.to_k": delta(tensors, f"{name}.1", 0.5),
        "transformer.single_transformer_blocks.0.proj_mlp": delta(tensors, f"{name}.3", 0.5),
    }
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), expected)


def test_a_block_diagonal_fused_b_loses_its_dead_ranks_exactly(tmp_path: Path):
    name, rank = "lora_unet_double_blocks_0_img_attn_qkv", 4
    B = torch.block_diag(*(numbers(WIDTH, rank, seed=part) for part in range(3)))
    tensors = {f"{name}.lora_down.weight": numbers(3 * rank, WIDTH), f"{name}.lora_up.weight": B}
    packed = pack_file(write_adapter(tmp_path / "a.safetensors", tensors), flux_layout())
    assert packed.ranks == (rank, rank, rank)
    expected = {
        f"transformer.transformer_blocks.0.attn.{module}": delta(tensors, name, 1.0, slice(i * WIDTH, (i + 1) * WIDTH))
        for i, module in enumerate(("to_q", "to_k", "to_v"))
    }
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), expected)


@pytest.mark.parametrize(
    "name", ["lora_unet_final_layer_adaLN_modulation_1", "diffusion_model.final_layer.adaLN_modulation.1"]
)
def test_the_halves_of_the_final_modulation_are_swapped(tmp_path: Path, name: str):
    tensors = kohya(name, 2 * WIDTH, WIDTH, rank=4, alpha=1)
    dense = delta(tensors, name, 1 / 4)
    expected = {"transformer.norm_out.linear": np.concatenate([dense[WIDTH:], dense[:WIDTH]])}
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), expected)


@pytest.mark.parametrize("in_layout", ["", "text_model."])
@pytest.mark.parametrize(
    "name",
    [
        f"text_encoder.text_model.{CLIP_Q}",
        f"text_encoder.{CLIP_Q}",
        "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
        "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
        f"text_encoders.clip_l.transformer.text_model.{CLIP_Q}",
    ],
)
def test_clip_is_found_with_and_without_text_model(tmp_path: Path, name: str, in_layout: str):
    tensors = kohya(name, 24, 24, rank=2, alpha=1)
    got = pack_tensors(tmp_path, flux_layout(text_model=in_layout), tensors)
    assert_equal(got, {f"text_encoder.{in_layout}{CLIP_Q}": delta(tensors, name, 0.5)})


@pytest.mark.parametrize(
    "name",
    [
        f"text_encoder_2.{T5_Q}",
        "lora_te3_encoder_block_0_layer_0_SelfAttention_q",
        "lora_te2_encoder_block_0_layer_0_SelfAttention_q",
        f"text_encoders.t5xxl.transformer.{T5_Q}",
    ],
)
def test_t5_is_found_by_its_path_whatever_its_number(tmp_path: Path, name: str):
    tensors = kohya(name, 40, 40, rank=2, alpha=2)
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), {f"text_encoder_2.{T5_Q}": delta(tensors, name)})


def test_xlabs_names_fall_out_of_the_table(tmp_path: Path):
    double, single = "double_blocks.0.processor.qkv_lora2", "single_blocks.0.processor.qkv_lora"
    tensors = {}
    for name, seed in ((double, 0), (single, 7)):
        tensors |= {f"{name}.down.weight": numbers(4, WIDTH, seed=seed)}
        tensors |= {f"{name}.up.weight": numbers(3 * WIDTH, 4, seed=seed + 1)}
    got = pack_tensors(tmp_path, flux_layout(), tensors)
    assert len(got) == 6
    up, down = (tensors[f"{single}.{part}.weight"].double().numpy() for part in ("up", "down"))
    assert np.allclose(got["transformer.single_transformer_blocks.0.attn.to_v"], (up @ down)[2 * WIDTH :])


def test_convolutions_are_flattened_and_a_1x1_convolution_is_a_matrix(tmp_path: Path):
    conv, proj = "lora_unet_down_blocks_0_resnets_0_conv1", "lora_unet_down_blocks_0_attentions_0_proj_in"
    tensors = {
        f"{conv}.lora_down.weight": numbers(4, 8, 3, 3),
        f"{conv}.lora_up.weight": numbers(16, 4, 1, 1),
        f"{conv}.alpha": torch.tensor(2.0),
    }
    tensors |= kohya(proj, 16, 16, rank=2, alpha=2)
    expected = {
        "unet.down_blocks.0.resnets.0.conv1": delta(tensors, conv, 0.5),
        "unet.down_blocks.0.attentions.0.proj_in": delta(tensors, proj),
    }
    assert_equal(pack_tensors(tmp_path, unet_layout(), tensors), expected)


def test_ranks_may_differ_and_the_shorter_are_padded_with_zeros(tmp_path: Path):
    tensors: Tensors = {}
    for module, rank in (("to_q", 10), ("to_k", 18), ("to_v", 11)):
        tensors |= kohya(f"transformer.transformer_blocks.0.attn.{module}", WIDTH, WIDTH, rank, alpha=rank / 2)
    packed = pack_file(write_adapter(tmp_path / "a.safetensors", tensors), flux_layout())
    assert packed.rank == 18
    assert packed.ranks == (10, 18, 11)
    assert not packed.rows[10:, : 2 * WIDTH].any()


def test_a_rank_above_the_width_of_its_module_is_reduced_exactly(tmp_path: Path):
    tensors = peft("transformer.x_embedder", WIDTH, 4, rank=48)
    path = write_adapter(tmp_path / "a.safetensors", tensors)
    assert pack_file(path, flux_layout(), max_rank=16).ranks == (4,)
    assert_equal(
        pack_tensors(tmp_path, flux_layout(), tensors),
        {"transformer.x_embedder": delta(tensors, "transformer.x_embedder")},
    )
    with pytest.raises(AdapterRejected, match=r"net\.2.* rank 48") as refused:
        pack_file(
            write_adapter(path, peft("transformer.proj_out", 4, WIDTH, 48) | peft(FF, WIDTH, 4 * WIDTH, 48)),
            flux_layout(),
            max_rank=16,
        )
    assert refused.value.cause == "RANK_TOO_LARGE"
    assert "16" in refused.value.message


def test_two_equal_copies_of_a_module_count_once(tmp_path: Path):
    fused = kohya("lora_unet_double_blocks_0_img_attn_proj", WIDTH, WIDTH, 4, alpha=4)
    A, B, _ = fused.values()
    copy = {"transformer.transformer_blocks.0.attn.to_out.0.lora_A.weight": A}
    copy |= {"transformer.transformer_blocks.0.attn.to_out.0.lora_B.weight": B}
    got = pack_tensors(tmp_path, flux_layout(), fused | copy)
    assert list(got) == ["transformer.transformer_blocks.0.attn.to_out.0"]


def test_an_all_zero_bias_difference_is_dropped(tmp_path: Path):
    tensors = peft(f"transformer.{TO_Q}", WIDTH, WIDTH, 4)
    extra = {f"transformer.{TO_Q}.diff_b": torch.zeros(WIDTH), "transformer.norm.w_norm": torch.zeros(3)}
    assert list(pack_tensors(tmp_path, flux_layout(), tensors | extra)) == [f"transformer.{TO_Q}"]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_float_dtype_of_a_file_is_read_as_torch_reads_it(tmp_path: Path, dtype: torch.dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in peft(f"transformer.{TO_Q}", WIDTH, WIDTH, 4).items()}
    got = pack_tensors(tmp_path, flux_layout(), tensors)
    assert_equal(got, {f"transformer.{TO_Q}": delta(tensors, f"transformer.{TO_Q}")})


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_rows_are_rounded_as_torch_rounds(tmp_path: Path, dtype: str, torch_dtype: torch.dtype):
    tensors = kohya(f"transformer.{TO_Q}", WIDTH, WIDTH, 4, alpha=3)
    A, B, _ = tensors.values()
    packed = pack_file(write_adapter(tmp_path / "a.safetensors", tensors), flux_layout(dtype))
    expected = torch.cat([A, (B * np.float32(3 / 4)).T], dim=1).to(torch_dtype)
    got = torch.from_numpy(packed.rows.view(np.int16).copy()).view(torch_dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_alpha_may_have_any_dtype_and_one_dimension(tmp_path: Path, dtype: torch.dtype):
    tensors = kohya(f"transformer.{TO_Q}", WIDTH, WIDTH, 4)
    tensors[f"transformer.{TO_Q}.alpha"] = torch.tensor([2], dtype=dtype)
    got = pack_tensors(tmp_path, flux_layout(), tensors)
    assert_equal(got, {f"transformer.{TO_Q}": delta(tensors, f"transformer.{TO_Q}", 0.5)})


def test_alpha_is_each_modules_own(tmp_path: Path):
    names = ["transformer.transformer_blocks.0.attn.to_q", "transformer.transformer_blocks.0.attn.to_k"]
    tensors = kohya(names[0], WIDTH, WIDTH, 16, 94) | kohya(names[1], WIDTH, WIDTH, 16, 123)
    got = pack_tensors(tmp_path, flux_layout(), tensors)
    assert_equal(got, {names[0]: delta(tensors, names[0], 94 / 16), names[1]: delta(tensors, names[1], 123 / 16)})


@pytest.mark.parametrize(
    ("noted", "scaling"),
    [
        ({"r": 4, "lora_alpha": 16}, 4.0),
        ({"r": 4, "lora_alpha": 16, "use_rslora": True}, 8.0),
        ({"r": 8, "rank_pattern": {TO_Q: 4}, "lora_alpha": 16, "alpha_pattern": {"to_q": 2}}, 0.5),
        ({"r": 4}, 1.0),
    ],
)
def test_alpha_may_stand_in_the_metadata(tmp_path: Path, noted: dict[str, object], scaling: float):
    tensors = peft(f"transformer.{TO_Q}", WIDTH, WIDTH, 4)
    metadata = json.dumps({f"transformer.{name}": value for name, value in noted.items()})
    got = pack_tensors(tmp_path, flux_layout(), tensors, lora_adapter_metadata=metadata)
    assert_equal(got, {f"transformer.{TO_Q}": delta(tensors, f"transformer.{TO_Q}", scaling)})


def test_an_adapter_config_next_to_the_file_gives_alpha(tmp_path: Path):
    name = f"base_model.model.{TO_Q}"
    tensors = peft(name, WIDTH, WIDTH, 4)
    path = write_adapter(tmp_path / "adapter_model.safetensors", tensors)
    with_config = pack_file(path, flux_layout(), config=b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    without = pack_file(path, flux_layout())
    assert np.array_equal(with_config.rows[:, WIDTH:], 2 * without.rows[:, WIDTH:])


def test_ss_network_alpha_is_never_used(tmp_path: Path):
    tensors = peft(f"transformer.{TO_Q}", WIDTH, WIDTH, 4)
    got = pack_tensors(tmp_path, flux_layout(), tensors, ss_network_alpha="1", ss_network_args='{"rs_lora": true}')
    assert_equal(got, {f"transformer.{TO_Q}": delta(tensors, f"transformer.{TO_Q}")})
