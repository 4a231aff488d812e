"""Every algorithm from its keys to rank rows, against its formula in dense fp64; refusals by their right name."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_store.errors import Cause
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from loraplex.pack_options import EXACTLY, PackOptions
from tests.adapter_store.samples import (
    WIDTH,
    Float64,
    Tensors,
    assert_equal,
    delta,
    dense,
    fit_adapter,
    flux_layout,
    kohya,
    numbers,
    pack_tensors,
    packed_sample,
    peft,
    unet_layout,
    write_adapter,
)

TO_Q = "transformer.transformer_blocks.0.attn.to_q"
QKV = "lora_unet_double_blocks_0_img_attn_qkv"
CONV = "lora_unet_down_blocks_0_resnets_0_conv1"
CONV_PATH = "unet.down_blocks.0.resnets.0.conv1"
PROJ_IN = "lora_unet_down_blocks_0_attentions_0_proj_in"
PROJ_PATH = "unet.down_blocks.0.attentions.0.proj_in"


def fp64(tensor: torch.Tensor) -> Float64:
    return tensor.double().numpy()


def refuse(folder: Path, tensors: Tensors, options: PackOptions = EXACTLY, max_rank: int = 16) -> AdapterRejected:
    path = write_adapter(folder / "a.safetensors", tensors)
    with pytest.raises(AdapterRejected) as refused:
        fit_adapter(path, flux_layout(), max_rank=max_rank, options=options)
    return refused.value


def loha(stem: str, out: int, width: int, rank: int, alpha: float | None = None) -> Tensors:
    tensors = {
        f"{stem}.hada_w1_a": numbers(out, rank, seed=1),
        f"{stem}.hada_w1_b": numbers(rank, width, seed=2),
        f"{stem}.hada_w2_a": numbers(out, rank, seed=3),
        f"{stem}.hada_w2_b": numbers(rank, width, seed=4),
    }
    return tensors if alpha is None else tensors | {f"{stem}.alpha": torch.tensor(alpha)}


def loha_delta(tensors: Tensors, stem: str) -> Float64:
    w = {part: fp64(tensors[f"{stem}.hada_{part}"]) for part in ("w1_a", "w1_b", "w2_a", "w2_b")}
    return (w["w1_a"] @ w["w1_b"]) * (w["w2_a"] @ w["w2_b"])


@pytest.mark.parametrize("rank", [1, 3, 5, 9])
def test_loha_is_a_lora_of_the_squared_rank(tmp_path: Path, rank: int):
    tensors = loha(TO_Q, WIDTH, WIDTH, rank, alpha=2.0)
    fitted = fit_adapter(write_adapter(tmp_path / "a.safetensors", tensors), flux_layout())
    assert fitted.packed.ranks == (min(rank**2, WIDTH),)
    assert_equal(dense(fitted.packed), {TO_Q: 2 / rank * loha_delta(tensors, TO_Q)})


def test_loha_and_lokr_over_a_fused_projection_are_cut_by_rows(tmp_path: Path):
    paths = [f"transformer.transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]
    hadamard = loha(QKV, 3 * WIDTH, WIDTH, 3)
    w1, w2 = numbers(8, 4), numbers(12, 8)  # 12 rows of w2: no border between q, k and v is one between blocks
    kronecker = {f"{QKV}.lokr_w1": w1, f"{QKV}.lokr_w2": w2}
    for tensors, whole in ((hadamard, loha_delta(hadamard, QKV)), (kronecker, np.kron(fp64(w1), fp64(w2)))):
        expected = {path: whole[part * WIDTH : (part + 1) * WIDTH] for part, path in enumerate(paths)}
        assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), expected)


@pytest.mark.parametrize("alpha", [1.0, 99.0, 0.0, -3.0])
def test_lokr_of_two_whole_factors_has_no_scaling_whatever_alpha_says(tmp_path: Path, alpha: float):
    """Row 58."""
    w1, w2 = numbers(4, 8), numbers(8, 4)
    tensors = {f"{TO_Q}.lokr_w1": w1, f"{TO_Q}.lokr_w2": w2, f"{TO_Q}.alpha": torch.tensor(alpha)}
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), {TO_Q: np.kron(fp64(w1), fp64(w2))})


def test_the_lokr_files_that_others_do_not_read(tmp_path: Path):
    """Rows 3 and 7: the prefix of LyCORIS, and factors of every kind."""
    stem = "lycoris_transformer_blocks_0_attn_to_q"
    tensors = {
        f"{stem}.alpha": torch.tensor(1.0),
        f"{stem}.lokr_w1": numbers(4, 4),
        f"{stem}.lokr_w2_a": numbers(8, 2, seed=1),
        f"{stem}.lokr_w2_b": numbers(2, 8, seed=2),
    }
    w2 = fp64(tensors[f"{stem}.lokr_w2_a"]) @ fp64(tensors[f"{stem}.lokr_w2_b"])
    expected = {TO_Q: np.kron(fp64(tensors[f"{stem}.lokr_w1"]), w2) / 2}
    fitted = fit_adapter(write_adapter(tmp_path / "a.safetensors", tensors), flux_layout())
    assert fitted.packed.ranks == (8,)
    assert fitted.found.dialects == ("lycoris",)
    assert_equal(dense(fitted.packed), expected)


def test_tucker_is_folded_into_a(tmp_path: Path):
    """Rows 17 and 103: lora_mid."""
    tensors = {
        f"{CONV}.lora_down.weight": numbers(4, 8, 1, 1),
        f"{CONV}.lora_mid.weight": numbers(4, 4, 3, 3),
        f"{CONV}.lora_up.weight": numbers(16, 4, 1, 1),
        f"{CONV}.alpha": torch.tensor(2.0),
    }
    down, mid, up = (fp64(tensors[f"{CONV}.lora_{part}.weight"]) for part in ("down", "mid", "up"))
    expected = np.einsum("om,mnhw,ni->oihw", up[:, :, 0, 0], mid, down[:, :, 0, 0]).reshape(16, -1) / 2
    assert_equal(pack_tensors(tmp_path, unet_layout(), tensors), {CONV_PATH: expected})


@pytest.mark.parametrize("shape", [(4, 8, 3, 3), (4, 8, 1, 1), (4, 8), (4, 72)])
def test_the_kernel_of_a_convolution_must_be_the_modules(tmp_path: Path, shape: tuple[int, ...]):
    """Row 104; a smaller kernel is another function, and a flat one could be anything."""
    tensors = {f"{CONV}.lora_down.weight": numbers(*shape), f"{CONV}.lora_up.weight": numbers(16, 4, 1, 1)}
    if shape == (4, 8, 3, 3):
        assert_equal(pack_tensors(tmp_path, unet_layout(), tensors), {CONV_PATH: delta(tensors, CONV)})
        return
    with pytest.raises(AdapterRejected) as refused:
        pack_tensors(tmp_path, unet_layout(), tensors)
    assert (refused.value.cause, refused.value.key) == ("SHAPE_MISMATCH", f"{CONV}.lora_down.weight")


@pytest.mark.parametrize("shape", [(4, 16), (4, 16, 1, 1)])
def test_a_1x1_convolution_is_a_matrix_and_back(tmp_path: Path, shape: tuple[int, ...]):
    matrix = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors: Tensors = {}
    for stem in (PROJ_IN, matrix):
        tensors |= {f"{stem}.lora_down.weight": numbers(*shape), f"{stem}.lora_up.weight": numbers(16, 4, *shape[2:])}
    got = pack_tensors(tmp_path, unet_layout(), tensors)
    path = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    assert_equal(got, {PROJ_PATH: delta(tensors, PROJ_IN), path: delta(tensors, matrix)})


@pytest.mark.parametrize("module", ["to_q", "ff.net.2"])
def test_a_full_difference_is_exact_where_its_rank_fits(tmp_path: Path, module: str):
    """Row 15."""
    path, inputs = f"transformer.transformer_blocks.0.{'attn.' if module == 'to_q' else ''}{module}", WIDTH
    inputs = WIDTH if module == "to_q" else 4 * WIDTH
    tensors = {f"{path}.diff": numbers(WIDTH, inputs)}
    assert_equal(pack_tensors(tmp_path, flux_layout(), tensors), {path: fp64(tensors[f"{path}.diff"])})
    convolution = {f"{CONV}.diff": numbers(16, 8, 3, 3)}
    got = pack_tensors(tmp_path, unet_layout(), convolution)
    assert_equal(got, {CONV_PATH: fp64(convolution[f"{CONV}.diff"]).reshape(16, -1)})


def test_a_difference_of_too_many_ranks_is_refused_with_both_and_with_what_a_cut_would_cost(tmp_path: Path):
    """Rows 65, 67 and 68."""
    tensors = {f"{TO_Q}.diff": numbers(WIDTH, WIDTH)}
    error = refuse(tmp_path, tensors)
    assert (error.cause, error.key) == ("RANK_TOO_LARGE", f"{TO_Q}.diff")
    assert "needs 32" in error.message
    assert "at most 16" in error.message
    assert "max_error" in error.message
    values = np.linalg.svd(fp64(tensors[f"{TO_Q}.diff"]), compute_uv=False)
    cost = np.sqrt(np.square(values[16:]).sum() / np.square(values).sum())
    error = refuse(tmp_path, tensors, PackOptions(max_error=cost * 0.99))
    assert f"{cost:.4g}" in error.message
    allowed = PackOptions(max_error=cost * 1.01)
    fitted = fit_adapter(tmp_path / "a.safetensors", flux_layout(), max_rank=16, options=allowed)
    assert fitted.packed.ranks == (16,)
    assert fitted.packed.error == pytest.approx(cost, rel=1e-5)
    got = dense(fitted.packed)[TO_Q]
    whole = fp64(tensors[f"{TO_Q}.diff"])
    assert np.linalg.norm(got - whole) / np.linalg.norm(whole) == pytest.approx(cost, rel=1e-5)


@pytest.mark.parametrize("max_rank", [3, 8, 20])
@pytest.mark.parametrize(
    ("stem", "path", "rows"),
    [(TO_Q, TO_Q, slice(None)), ("lora_unet_final_layer_adaLN_modulation_1", "transformer.norm_out.linear", None)],
)
def test_a_cut_of_lokr_is_the_best_there_is(tmp_path: Path, stem: str, path: str, rows: slice | None, max_rank: int):
    """Also where the halves of the rows change places, and with a scaling."""
    out = WIDTH if rows else 2 * WIDTH
    tensors = {
        f"{stem}.lokr_w1": numbers(4, 4),
        f"{stem}.lokr_w2_a": numbers(out // 4, 6, seed=1),
        f"{stem}.lokr_w2_b": numbers(6, 8, seed=2),
        f"{stem}.alpha": torch.tensor(3.0),
    }
    w2 = fp64(tensors[f"{stem}.lokr_w2_a"]) @ fp64(tensors[f"{stem}.lokr_w2_b"])
    whole = np.kron(fp64(tensors[f"{stem}.lokr_w1"]), w2) * 3 / 6
    if rows is None:
        whole = np.concatenate([whole[WIDTH:], whole[:WIDTH]])
    values = np.linalg.svd(whole, compute_uv=False)
    cost = np.sqrt(np.square(values[max_rank:]).sum() / np.square(values).sum())
    path_in = write_adapter(tmp_path / "a.safetensors", tensors)
    options = PackOptions(max_rank=max_rank, max_error=0.99)
    fitted = fit_adapter(path_in, flux_layout(), options=options)
    got = dense(fitted.packed)[path]
    assert fitted.packed.ranks == (max_rank,)
    assert fitted.packed.error == pytest.approx(cost, rel=1e-5)
    assert np.linalg.norm(got - whole) / np.linalg.norm(whole) == pytest.approx(cost, rel=1e-5)


def test_only_modules_of_too_large_a_rank_are_cut(tmp_path: Path):
    to_k = TO_Q.replace("to_q", "to_k")
    tensors = peft(TO_Q, WIDTH, WIDTH, 8) | peft(to_k, WIDTH, WIDTH, 4)
    path = write_adapter(tmp_path / "a.safetensors", tensors)
    packed = fit_adapter(path, flux_layout(), options=PackOptions(max_rank=5, max_error=0.9)).packed
    assert packed.ranks == (5, 4)
    assert packed.errors[0] > 0
    assert packed.errors[1] == 0
    assert packed.error == packed.errors[0]
    assert_equal({to_k: dense(packed)[to_k]}, {to_k: delta(tensors, to_k)})


def test_ranks_that_a_block_diagonal_b_only_seems_to_need_are_not_counted(tmp_path: Path):
    """A split qkv of kohya is written with three times the rank that any of its modules has."""
    B = torch.block_diag(*(numbers(WIDTH, 8, seed=part) for part in range(3)))
    tensors = {f"{QKV}.lora_down.weight": numbers(24, WIDTH), f"{QKV}.lora_up.weight": B}
    packed = fit_adapter(write_adapter(tmp_path / "a.safetensors", tensors), flux_layout(), max_rank=8).packed
    assert packed.ranks == (8, 8, 8)


def test_two_copies_that_are_rounded_differently_count_once(tmp_path: Path):
    name = "lora_transformer_transformer_blocks_0_attn_to_q"
    tensors = kohya(name, WIDTH, WIDTH, 4, alpha=3)
    A, B, _ = tensors.values()
    folded = {f"{TO_Q}.lora_A.weight": A * 0.75, f"{TO_Q}.lora_B.weight": B}
    for order in (tensors | folded, folded | tensors):
        assert_equal(pack_tensors(tmp_path, flux_layout(), order), {TO_Q: delta(tensors, name, 0.75)})
    folded[f"{TO_Q}.lora_B.weight"] = B * 1.001
    assert refuse(tmp_path, tensors | folded).cause == "DUPLICATE_MODULE"


def test_numbers_that_only_become_too_large_when_multiplied_are_refused(tmp_path: Path):
    huge = {key: tensor * 1e20 for key, tensor in loha(TO_Q, WIDTH, WIDTH, 2).items()}
    assert refuse(tmp_path, huge).cause == "OVERFLOW"
    huge = {key: tensor * 1e20 for key, tensor in loha(TO_Q, WIDTH, WIDTH, 5).items()}
    assert refuse(tmp_path, huge).cause == "OVERFLOW"
    whole = {f"{TO_Q}.lokr_w1": numbers(4, 4) * 1e25, f"{TO_Q}.lokr_w2": numbers(8, 8) * 1e25}
    assert refuse(tmp_path, whole, max_rank=32).cause == "OVERFLOW"


REFUSED: dict[str, tuple[Callable[[], Tensors], Cause, str]] = {
    "alpha beside a full difference": (
        lambda: {f"{TO_Q}.diff": numbers(WIDTH, WIDTH), f"{TO_Q}.alpha": torch.tensor(1.0)},
        Cause.ALPHA_INVALID,
        f"{TO_Q}.alpha",
    ),
    "LoHa without its second product": (
        lambda: {key: one for key, one in loha(TO_Q, WIDTH, WIDTH, 3).items() if "w2" not in key},
        Cause.INCOMPLETE_PAIR,
        f"{TO_Q}.hada_w1_a",
    ),
    "LoHa with one core": (
        lambda: loha(TO_Q, WIDTH, WIDTH, 3) | {f"{TO_Q}.hada_t1": numbers(3, 3, 3, 3)},
        Cause.INCOMPLETE_PAIR,
        "",
    ),
    "LoHa of two sizes": (
        lambda: loha(TO_Q, WIDTH, WIDTH, 3) | {f"{TO_Q}.hada_w2_b": numbers(3, 8)},
        Cause.SHAPE_MISMATCH,
        f"{TO_Q}.hada_w2_a",
    ),
    "LoHa of two ranks": (
        lambda: loha(TO_Q, WIDTH, WIDTH, 3) | {f"{TO_Q}.hada_w2_b": numbers(4, WIDTH)},
        Cause.RANK_MISMATCH,
        f"{TO_Q}.hada_w2_b",
    ),
    "LoKr with factors of two ranks": (
        lambda: {
            f"{TO_Q}.lokr_w1_a": numbers(8, 2),
            f"{TO_Q}.lokr_w1_b": numbers(2, 8),
            f"{TO_Q}.lokr_w2_a": numbers(4, 3),
            f"{TO_Q}.lokr_w2_b": numbers(3, 4),
        },
        Cause.RANK_MISMATCH,
        f"{TO_Q}.lokr_w2_b",
    ),
    "a core of another rank": (
        lambda: kohya(TO_Q, WIDTH, WIDTH, 4) | {f"{TO_Q}.lora_mid.weight": numbers(4, 5, 3, 3)},
        Cause.RANK_MISMATCH,
        f"{TO_Q}.lora_mid.weight",
    ),
    "one factor in two spellings": (
        lambda: peft(TO_Q, WIDTH, WIDTH, 4) | {f"{TO_Q}.lora_A": numbers(4, WIDTH)},
        Cause.DUPLICATE_MODULE,
        "",
    ),
    "a stray factor of LoHa": (  # row 44
        lambda: peft(TO_Q, WIDTH, WIDTH, 4) | {f"{TO_Q.replace('to_q', 'to_k')}.hada_w1_a": numbers(4, 4)},
        Cause.INCOMPLETE_PAIR,
        f"{TO_Q.replace('to_q', 'to_k')}.hada_w1_a",
    ),
    "a full difference of another width": (
        lambda: {f"{TO_Q}.diff": numbers(WIDTH, 24)},
        Cause.SHAPE_MISMATCH,
        f"{TO_Q}.diff",
    ),
    "a bias that is not zero": (  # row 42
        lambda: (
            kohya("lora_unet_double_blocks_0_img_attn_proj", WIDTH, WIDTH, 4)
            | {"lora_unet_double_blocks_0_img_attn_proj.diff_b": numbers(WIDTH)}
        ),
        Cause.BIAS_DIFFERENCE,
        "lora_unet_double_blocks_0_img_attn_proj.diff_b",
    ),
    "a norm that is not zero": (  # row 42
        lambda: peft(TO_Q, WIDTH, WIDTH, 4) | {"diffusion_model.blocks.0.norm3.diff": numbers(WIDTH)},
        Cause.UNSUPPORTED_ALGORITHM,
        "diffusion_model.blocks.0.norm3.diff",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sound_difference_is_refused_by_cause_and_key(tmp_path: Path, name: str):
    build, cause, key = REFUSED[name]
    error = refuse(tmp_path, build(), max_rank=128)
    assert error.cause == cause.value
    if key:
        assert error.key == key


def test_pieces_of_one_module_that_a_file_has_apart_are_put_together(tmp_path: Path):
    """A fused module of the layout whose parts a file trained apart, as Flux.2 and ComfyUI's Z-Image have them."""
    from adapter_store.dialects.names import Share
    from adapter_store.groups import read_groups
    from adapter_store.pack import Packing
    from adapter_store.placing import Piece, Placed
    from adapter_store.validate import open_file

    module = TargetModule("transformer", "attention.qkv", "linear", 12, 30)
    layout = Layout("tiny", "Other", "F32", (module,))
    tensors = peft("q", 10, 12, 3) | peft("v", 10, 12, 4, seed=5)
    with open_file(write_adapter(tmp_path / "a.safetensors", tensors), 1 << 20) as file:
        shares = {"q": Share(0, (slice(0, 10),), 0), "v": Share(0, (slice(0, 10),), 20)}
        pieces = tuple(
            Piece(group, shares[group.stem].rows, shares[group.stem].start, 0.5, False)
            for group in read_groups(file).groups
        )
        packed = packed_sample(file, Packing(layout, (Placed(0, module, pieces),), limit=16), tmp_path / "a")
    expected = np.zeros((30, 12))
    expected[:10], expected[20:] = delta(tensors, "q", 0.5), delta(tensors, "v", 0.5)
    assert packed.ranks == (7,)
    assert_equal(dense(packed), {"transformer.attention.qkv": expected})
