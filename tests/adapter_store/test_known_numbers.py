"""Rows of the known failures of other loaders that concern numbers, each with its smallest input."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import (
    WIDTH,
    Tensors,
    assert_equal,
    delta,
    fit_adapter,
    flux_layout,
    kohya,
    numbers,
    pack_file,
    pack_tensors,
    peft,
    write_adapter,
)

BLOCK = "transformer.transformer_blocks.0"
TO_Q, TO_K = f"{BLOCK}.attn.to_q", f"{BLOCK}.attn.to_k"


def layout_of(*names: str, family: str = "Other", width: int = WIDTH) -> Layout:
    modules = tuple(TargetModule("transformer", name, "linear", width, width) for name in names)
    return Layout("tiny", family, "F32", modules)


def refusal(folder: Path, tensors: Tensors, layout: Layout | None = None, **metadata: str) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as refused:
        pack_tensors(folder, layout or flux_layout(), tensors, **metadata)
    return refused.value


def test_alpha_is_per_module(tmp_path: Path):
    """Row 46: alpha 94 and 123 at rank 128."""
    tensors = kohya(TO_Q, WIDTH, WIDTH, 128, 94) | kohya(TO_K, WIDTH, WIDTH, 128, 123, seed=3)
    expected = {TO_Q: delta(tensors, TO_Q, 94 / 128), TO_K: delta(tensors, TO_K, 123 / 128)}
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_without_alpha_every_rank_has_scaling_one_in_any_order(tmp_path: Path, reverse: bool):
    """Row 47: ranks 4 and 8."""
    tensors = peft(TO_Q, WIDTH, WIDTH, 4) | peft(TO_K, WIDTH, WIDTH, 8)
    ordered = dict(sorted(tensors.items(), reverse=reverse))
    assert_equal(
        pack_tensors(tmp_path, flux_layout(), ordered), {TO_Q: delta(tensors, TO_Q), TO_K: delta(tensors, TO_K)}
    )


def test_the_alpha_of_a_distilled_adapter_is_read(tmp_path: Path):
    """Rows 48 and 52: rank 64, alpha 8."""
    layout = layout_of("transformer_blocks.0.attn.to_q", family="QwenImagePipeline", width=96)
    tensors = kohya("transformer_blocks.0.attn.to_q", 96, 96, 64, 8)
    got = pack_tensors(tmp_path, layout, tensors)
    assert_equal(got, {TO_Q: delta(tensors, "transformer_blocks.0.attn.to_q", 8 / 64)})


def test_alpha_in_the_metadata_counts_where_no_tensor_says_otherwise(tmp_path: Path):
    """Row 49: rank 16, lora_alpha 64; and a tensor that contradicts it is a refusal."""
    noted = {"lora_adapter_metadata": json.dumps({"transformer.r": 16, "transformer.lora_alpha": 64})}
    tensors = peft(TO_Q, WIDTH, WIDTH, 16)
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors, **noted), {TO_Q: delta(tensors, TO_Q, 4.0)})
    agreed = tensors | {f"{TO_Q}.alpha": torch.tensor(64.0)}
    assert_equal(pack_tensors(tmp_path, flux_layout(), agreed, **noted), {TO_Q: delta(tensors, TO_Q, 4.0)})
    contradicted = tensors | {f"{TO_Q}.alpha": torch.tensor(16.0)}
    assert refusal(tmp_path, contradicted, **noted).cause == "ALPHA_CONFLICT"


def test_the_alpha_of_a_text_encoder_is_read(tmp_path: Path):
    """Row 51."""
    name = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    tensors = kohya(name, 24, 24, 4, 1)
    path = "text_encoder.encoder.layers.0.self_attn.q_proj"
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), {path: delta(tensors, name, 0.25)})


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path):
    """Row 53: rank 16, alpha 16."""
    noted = json.dumps({"transformer.lora_alpha": 16, "transformer.use_rslora": True})
    tensors = peft(TO_Q, WIDTH, WIDTH, 16)
    got = pack_tensors(tmp_path, flux_layout(), tensors, lora_adapter_metadata=noted)
    assert_equal(got, {TO_Q: delta(tensors, TO_Q, 4.0)})


def test_rslora_of_lycoris_is_in_its_alpha_already(tmp_path: Path):
    """Row 54."""
    tensors = kohya(TO_Q, WIDTH, WIDTH, 16, 8)
    got = pack_tensors(tmp_path, flux_layout(), tensors, ss_network_args='{"rs_lora": "True"}')
    assert_equal(got, {TO_Q: delta(tensors, TO_Q, 0.5)})


@pytest.mark.parametrize("alpha", [0.0, -4.0])
def test_an_alpha_that_means_different_things_to_different_tools_is_refused(tmp_path: Path, alpha: float):
    """Rows 55 and 56; also for LoHa, and LoKr in factors."""
    loha = {f"{TO_Q}.hada_w{i}_{side}": numbers(4, 4) for i in "12" for side in "ab"}
    lokr = {f"{TO_Q}.lokr_w1": numbers(2, 2), f"{TO_Q}.lokr_w2_a": numbers(2, 1), f"{TO_Q}.lokr_w2_b": numbers(1, 2)}
    layout = layout_of("transformer_blocks.0.attn.to_q", width=4)
    for tensors in (kohya(TO_Q, 4, 4, 4), loha, lokr):
        error = refusal(tmp_path, tensors | {f"{TO_Q}.alpha": torch.tensor(alpha)}, layout)
        assert (error.cause, error.key) == ("ALPHA_INVALID", f"{TO_Q}.alpha")


def test_a_rank_per_layer(tmp_path: Path):
    """Row 62: ranks 10, 18 and 11."""
    names = [f"{BLOCK}.attn.{name}" for name in ("to_q", "to_k", "to_v")]
    tensors: Tensors = {}
    for name, rank in zip(names, (10, 18, 11), strict=True):
        tensors |= kohya(name, WIDTH, WIDTH, rank, alpha=rank / 2)
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), {name: delta(tensors, name, 0.5) for name in names})


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path):
    """Row 64."""
    noted = json.dumps({"transformer.alpha_pattern": {"^q_proj": 100}})
    error = refusal(tmp_path, peft(TO_Q, WIDTH, WIDTH, 4), lora_adapter_metadata=noted)
    assert error.cause == "METADATA_INVALID"


def test_a_rank_above_the_width_is_legal(tmp_path: Path):
    """Row 65: rank 48 on a module of 32, packed with 32."""
    tensors = kohya(TO_Q, WIDTH, WIDTH, 48, 24)
    path = write_adapter(tmp_path / "a.safetensors", tensors)
    assert pack_file(path, flux_layout(), max_rank=32).ranks == (32,)
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), {TO_Q: delta(tensors, TO_Q, 0.5)})


def pair(shape_of_A: tuple[int, ...], shape_of_B: tuple[int, ...]) -> Tensors:
    return {f"{TO_Q}.lora_A.weight": numbers(*shape_of_A), f"{TO_Q}.lora_B.weight": numbers(*shape_of_B)}


def beside(key: str, *shape: int) -> Tensors:
    return pair((4, 32), (32, 4)) | {key: numbers(*shape)}


SHAPES: dict[str, tuple[Callable[[], Tensors], str]] = {
    "row 67": (lambda: pair((64, 24), (32, 64)), "SHAPE_MISMATCH"),
    "row 70": (lambda: pair((4, 32), (32, 6)), "RANK_MISMATCH"),
    "row 71, A only": (lambda: {f"{TO_Q}.lora_A.weight": numbers(4, 32)}, "INCOMPLETE_PAIR"),
    "row 71, B only": (lambda: {f"{TO_Q}.lora_B.weight": numbers(32, 4)}, "INCOMPLETE_PAIR"),
    "row 71, alpha only": (lambda: {f"{TO_Q}.alpha": torch.tensor(4.0)}, "INCOMPLETE_PAIR"),
    "row 73": (lambda: pair((4, 24), (32, 4)), "SHAPE_MISMATCH"),
    "row 74": (lambda: pair((4, 40), (32, 4)), "SHAPE_MISMATCH"),
    "row 75": (lambda: peft("img_in", WIDTH, 8, 4), "CONTROL_LORA"),
    "row 99": (lambda: beside(f"{TO_Q}.dora_scale", 32, 1), "UNSUPPORTED_ALGORITHM"),
    "row 99, other axis": (lambda: beside(f"{TO_Q}.dora_scale", 1, 32), "UNSUPPORTED_ALGORITHM"),
    "row 101": (lambda: beside(f"{TO_Q}.lora_magnitude_vector", 32), "UNSUPPORTED_ALGORITHM"),
    "row 101, .weight": (lambda: beside(f"{TO_Q}.lora_magnitude_vector.weight", 32), "UNSUPPORTED_ALGORITHM"),
    "row 106": (lambda: pair((4, 32, 3, 3), (32, 4, 1, 1)), "SHAPE_MISMATCH"),
    "row 110": (lambda: beside("bundle_emb.a.string_to_param.*", 2, 4), "TEXTUAL_INVERSION"),
    "row 156": (
        lambda: pair((4, 32), (32, 4)) | peft("text_embedding_projection.aggregate_embed", 32, 32, 4),
        "COMPONENT_NOT_SERVED",
    ),
}


@pytest.mark.parametrize("row", SHAPES)
def test_what_other_loaders_apply_wrongly_is_refused(tmp_path: Path, row: str):
    build, cause = SHAPES[row]
    assert refusal(tmp_path, build()).cause == cause


def test_a_rank_above_the_limit_is_told_with_both_numbers(tmp_path: Path):
    """Row 68: rank 16 where 8 are packed."""
    path = write_adapter(tmp_path / "a.safetensors", peft(TO_Q, WIDTH, WIDTH, 16))
    with pytest.raises(AdapterRejected, match=r"rank 16.* at most 8") as refused:
        pack_file(path, flux_layout(), max_rank=8)
    assert refused.value.cause == "RANK_TOO_LARGE"


@pytest.mark.parametrize("module", ["resnets.0.conv1"])
def test_a_lora_of_a_convolution_keeps_its_kernel(tmp_path: Path, module: str):
    """Row 104."""
    target = TargetModule("unet", module, "conv2d", 8, 16, (3, 3))
    tensors = {"unet.resnets.0.conv1.lora_down.weight": numbers(4, 8, 3, 3)}
    tensors |= {"unet.resnets.0.conv1.lora_up.weight": numbers(16, 4, 1, 1)}
    got = pack_tensors(tmp_path, Layout("tiny", "Other", "F32", (target,)), tensors)
    assert_equal(got, {f"unet.{module}": delta(tensors, "unet.resnets.0.conv1")})


def test_float8_and_mixed_dtypes_are_calculated_in_float32(tmp_path: Path):
    """Rows 111 and 112."""
    A, B = numbers(4, WIDTH), numbers(WIDTH, 4, seed=1)
    tensors = {f"{TO_Q}.lora_down.weight": A.to(torch.float8_e4m3fn), f"{TO_Q}.lora_up.weight": B.half()}
    tensors |= {f"{TO_Q}.alpha": torch.tensor(3.0).bfloat16()}
    tensors |= {f"{TO_K}.lora_A.weight": A, f"{TO_K}.lora_B.weight": B.bfloat16()}
    expected = {TO_Q: delta(tensors, TO_Q, 0.75), TO_K: delta(tensors, TO_K)}
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), expected)


@pytest.mark.parametrize(
    ("value", "dtype", "cause"),
    [(1e6, "F16", "OVERFLOW"), (float("nan"), "BF16", "NOT_FINITE"), (float("nan"), "F32", "NOT_FINITE")],
)
def test_one_number_that_cannot_be_stored_is_named(tmp_path: Path, value: float, dtype: str, cause: str):
    """Rows 116, 117 and 118."""
    tensors = peft(TO_Q, WIDTH, WIDTH, 4)
    tensors[f"{TO_Q}.lora_A.weight"][1, 2] = value
    with pytest.raises(AdapterRejected) as refused:
        fit_adapter(write_adapter(tmp_path / "a.safetensors", tensors), flux_layout(dtype))
    assert (refused.value.cause, refused.value.key) == (cause, f"{TO_Q}.lora_A.weight")


def test_the_halves_of_b_alone_are_swapped_and_alpha_counts(tmp_path: Path):
    """Rows 150 and 152."""
    name = "lora_unet_final_layer_adaLN_modulation_1"
    tensors = kohya(name, 2 * WIDTH, WIDTH, 4, 1)
    whole = delta(tensors, name, 0.25)
    expected = {"transformer.norm_out.linear": np.concatenate([whole[WIDTH:], whole[:WIDTH]])}
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), expected)


def test_kohyas_suffixes_on_dotted_names_with_alpha(tmp_path: Path):
    """Row 155."""
    layout = layout_of("transformer_blocks.0.attn1.to_q", family="LTXPipeline")
    tensors = kohya("diffusion_model.transformer_blocks.0.attn1.to_q", WIDTH, WIDTH, 4, 2)
    got = pack_tensors(tmp_path, layout, tensors)
    expected = delta(tensors, "diffusion_model.transformer_blocks.0.attn1.to_q", 0.5)
    assert_equal(got, {"transformer.transformer_blocks.0.attn1.to_q": expected})
