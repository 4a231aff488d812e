"""One file for every reason of refusal: the store names the cause and the first bad key, and never a wrong reason."""

import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store.errors import REMEDIES, Cause
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import (
    WIDTH,
    Tensors,
    flux_layout,
    kohya,
    numbers,
    pack_file,
    peft,
    write_adapter,
)

TO_Q = "transformer.transformer_blocks.0.attn.to_q"
TO_K = "transformer.transformer_blocks.0.attn.to_k"
GOOD = peft(TO_Q, WIDTH, WIDTH, 4)


def refuse(path: Path, dtype: str = "F32", **limits: int) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as refused:
        pack_file(path, flux_layout(dtype), **limits)
    assert refused.value.remedy == REMEDIES[Cause(refused.value.cause)]
    return refused.value


def container(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with a header made by hand: a JSON text or what becomes one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def archive(kind: str) -> bytes:
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("a.safetensors", "x")
    else:
        with tarfile.open(fileobj=stream, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("a.safetensors"))
    return stream.getvalue()


WHOLE = container({"a.alpha": tensor([], 0, 4)}, b"\0" * 4)

CONTAINERS: dict[str, tuple[bytes, Cause, str]] = {
    "empty": (b"", Cause.EMPTY_FILE, ""),
    "seven bytes": (b"\0" * 7, Cause.TRUNCATED, ""),
    "web page": (b"\n<!DOCTYPE html><title>Sign in</title>", Cause.HTML_PAGE, ""),
    "html": (b"<html>404</html>", Cause.HTML_PAGE, ""),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", Cause.LFS_POINTER, ""),
    "pickle": (pickle.dumps({"a": 1}), Cause.PICKLE, ""),
    "zip": (archive("zip"), Cause.ARCHIVE, ""),
    "tar": (archive("tar"), Cause.ARCHIVE, ""),
    "GGUF": (b"GGUF" + b"\0" * 100, Cause.GGUF, ""),
    "JSON error of a hub": (b'{"error":"Repository not found"}', Cause.NOT_SAFETENSORS, ""),
    "no JSON": (container(b"[1, 2, 3, 4, 5, 6]"), Cause.NOT_SAFETENSORS, ""),
    "one byte short": (WHOLE[:-1], Cause.TRUNCATED, ""),
    "header cut": (WHOLE[:20], Cause.TRUNCATED, ""),
    "one byte more": (WHOLE + b"\0", Cause.TRAILING_BYTES, ""),
    "header of a terabyte": ((1 << 40).to_bytes(8, "little") + b"{" + b" " * 99, Cause.HEADER_TOO_LARGE, ""),
    "broken JSON": (container(b'{"a": '), Cause.HEADER_INVALID, ""),
    "deep JSON": (container(b'{"a":' * 100_000), Cause.HEADER_INVALID, ""),
    "no UTF-8": (container(b'{"\xff\xfe": 1}'), Cause.HEADER_INVALID, ""),
    "endless number": (container(b'{"a": ' + b"9" * 5000 + b"}"), Cause.HEADER_INVALID, ""),
    "metadata of numbers": (container({"__metadata__": {"a": 1}}), Cause.HEADER_INVALID, "__metadata__"),
    "entry without dtype": (container({"a": {"shape": [1]}}), Cause.HEADER_INVALID, "a"),
    "shape of texts": (container({"a": tensor(["1"], 0, 4)}, b"\0" * 4), Cause.HEADER_INVALID, "a"),  # type: ignore[list-item]
    "negative shape": (container({"a": tensor([-1, -1], 0, 4)}, b"\0" * 4), Cause.HEADER_INVALID, "a"),
    "shape of booleans": (container({"a": tensor([True], 0, 4)}, b"\0" * 4), Cause.HEADER_INVALID, "a"),
    "same key twice": (
        container(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":1}', b"\0" * 4),
        Cause.DUPLICATE_KEY,
        "a",
    ),
    "no tensors": (container({"__metadata__": {"format": "pt"}}), Cause.NO_TENSORS, ""),
    "complex numbers": (container({"a": tensor([1], 0, 8, "C64")}, b"\0" * 8), Cause.DTYPE_UNSUPPORTED, "a"),
    "integers": (container({"a": tensor([1], 0, 8, "I64")}, b"\0" * 8), Cause.DTYPE_UNSUPPORTED, "a"),
    "five dimensions": (container({"a": tensor([1] * 5, 0, 4)}, b"\0" * 4), Cause.SHAPE_INVALID, "a"),
    "no dimension": (container({"a.weight": tensor([], 0, 4)}, b"\0" * 4), Cause.SHAPE_INVALID, "a.weight"),
    "rank 0": (container({"a.lora_A.weight": tensor([0, 32], 0, 0)}), Cause.SHAPE_INVALID, "a.lora_A.weight"),
    "overlap": (
        container({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, b"\0" * 12),
        Cause.OFFSETS_INVALID,
        "b",
    ),
    "hole": (container({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, b"\0" * 12), Cause.OFFSETS_INVALID, "b"),
    "huge product": (
        container({"a": tensor([1 << 40, 1 << 40], 0, 4)}, b"\0" * 4),
        Cause.OFFSETS_INVALID,
        "a",
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_file_that_is_no_sound_safetensors_is_named_for_what_it_is(tmp_path: Path, name: str):
    content, cause, key = CONTAINERS[name]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    error = refuse(path)
    assert (error.cause, error.key) == (cause.value, key)


def test_a_file_over_the_size_limit_is_refused_before_it_is_read(tmp_path: Path):
    error = refuse(write_adapter(tmp_path / "a.safetensors", GOOD), max_bytes=100)
    assert error.cause == "FILE_TOO_LARGE"
    assert "100" in error.message


def control_lora() -> Tensors:
    return peft("double_blocks.0.img_attn.proj", WIDTH, WIDTH, 4) | {
        "double_blocks.0.img_attn.norm.query_norm.scale": numbers(16)
    }


def with_value(value: float, part: str = "A") -> Tensors:
    tensors = {name: one.clone() for name, one in GOOD.items()}
    tensors[f"{TO_Q}.lora_{part}.weight"][1, 2] = value
    return tensors


def without(part: str) -> Tensors:
    return {name: one for name, one in GOOD.items() if f"lora_{part}" not in name}


def lokr(*factors: str) -> Tensors:
    return {f"lycoris_transformer_blocks_0_attn_to_q.lokr_{one}": numbers(4, 4) for one in factors}


ADAPTERS: dict[str, tuple[Callable[[], Tensors], Cause, str]] = {
    "unknown key": (lambda: GOOD | {f"{TO_K}.something": numbers(4)}, Cause.UNKNOWN_KEY, f"{TO_K}.something"),
    "unknown end of A": (lambda: GOOD | {f"{TO_K}.lora_A.odd": numbers(4)}, Cause.UNKNOWN_KEY, f"{TO_K}.lora_A.odd"),
    "bias of A": (
        lambda: GOOD | {f"{TO_Q}.lora_A.bias": numbers(4)},
        Cause.UNSUPPORTED_ALGORITHM,
        f"{TO_Q}.lora_A.bias",
    ),
    "unknown module": (
        lambda: GOOD | peft("transformer.transformer_blocks.0.attn.NOPE", WIDTH, WIDTH, 4),
        Cause.UNKNOWN_MODULE,
        "transformer.transformer_blocks.0.attn.NOPE.lora_A.weight",
    ),
    "unknown underscored module": (
        lambda: kohya("lora_unet_double_stream_modulation_img_lin", 64, 32, 4, 2),
        Cause.UNKNOWN_MODULE,
        "lora_unet_double_stream_modulation_img_lin.lora_down.weight",
    ),
    "extra block": (
        lambda: GOOD | peft("transformer.transformer_blocks.1.attn.to_q", WIDTH, WIDTH, 4),
        Cause.UNKNOWN_MODULE,
        "transformer.transformer_blocks.1.attn.to_q.lora_A.weight",
    ),
    "unknown prefix": (
        lambda: peft("Hunyuan_video_I2V_lora_double_blocks_0", WIDTH, WIDTH, 4),
        Cause.UNKNOWN_MODULE,
        "Hunyuan_video_I2V_lora_double_blocks_0.lora_A.weight",
    ),
    "another component": (
        lambda: peft("connectors.audio.attn1.to_q", WIDTH, WIDTH, 4),
        Cause.COMPONENT_NOT_SERVED,
        "connectors.audio.attn1.to_q.lora_A.weight",
    ),
    "another denoiser": (
        lambda: peft("unet.down_blocks.0.attn1.to_q", WIDTH, WIDTH, 4),
        Cause.COMPONENT_NOT_SERVED,
        "unet.down_blocks.0.attn1.to_q.lora_A.weight",
    ),
    "DoRA of LyCORIS": (
        lambda: GOOD | {f"{TO_Q}.dora_scale": numbers(1, WIDTH)},
        Cause.UNSUPPORTED_ALGORITHM,
        f"{TO_Q}.dora_scale",
    ),
    "DoRA of peft": (
        lambda: GOOD | {f"{TO_Q}.lora_magnitude_vector.weight": numbers(WIDTH)},
        Cause.UNSUPPORTED_ALGORITHM,
        f"{TO_Q}.lora_magnitude_vector.weight",
    ),
    "a factor of LoHa alone": (
        lambda: GOOD | {f"{TO_K}.hada_w1_a": numbers(4, 4)},
        Cause.INCOMPLETE_PAIR,
        f"{TO_K}.hada_w1_a",
    ),
    "LoKr of another width": (
        lambda: lokr("w1", "w2"),
        Cause.SHAPE_MISMATCH,
        "lycoris_transformer_blocks_0_attn_to_q.lokr_w1",
    ),
    "LoKr with a side that is whole and in factors": (
        lambda: lokr("w1", "w1_a", "w1_b", "w2"),
        Cause.INCOMPLETE_PAIR,
        "lycoris_transformer_blocks_0_attn_to_q.lokr_w1",
    ),
    "LoKr with DoRA": (
        lambda: lokr("w1", "w2") | {"lycoris_transformer_blocks_0_attn_to_q.dora_scale": numbers(WIDTH, 1)},
        Cause.UNSUPPORTED_ALGORITHM,
        "lycoris_transformer_blocks_0_attn_to_q.dora_scale",
    ),
    "a core of Tucker alone": (
        lambda: GOOD | {f"{TO_K}.lora_mid.weight": numbers(4, 4, 3, 3)},
        Cause.INCOMPLETE_PAIR,
        f"{TO_K}.lora_mid.weight",
    ),
    "GLoRA": (lambda: {f"{TO_K}.a1.weight": numbers(4, 4)}, Cause.UNSUPPORTED_ALGORITHM, f"{TO_K}.a1.weight"),
    "OFT": (lambda: {"oft_unet_x.oft_blocks": numbers(4, 4)}, Cause.UNSUPPORTED_ALGORITHM, "oft_unet_x.oft_blocks"),
    "IA3": (lambda: {f"{TO_K}.on_input": numbers(4)}, Cause.UNSUPPORTED_ALGORITHM, f"{TO_K}.on_input"),
    "full weights": (
        lambda: GOOD | {"transformer.proj_out.weight": numbers(4, WIDTH)},
        Cause.UNSUPPORTED_ALGORITHM,
        "transformer.proj_out.weight",
    ),
    "full difference of too many ranks": (
        lambda: GOOD | {f"{TO_K}.diff": numbers(WIDTH, WIDTH)},
        Cause.RANK_TOO_LARGE,
        f"{TO_K}.diff",
    ),
    "norm difference": (
        lambda: GOOD | {"lycoris_norm.w_norm": numbers(4)},
        Cause.UNSUPPORTED_ALGORITHM,
        "lycoris_norm.w_norm",
    ),
    "Stable Cascade": (
        lambda: kohya("lora_prior_unet_x", 4, 4, 2),
        Cause.UNSUPPORTED_ALGORITHM,
        "lora_prior_unet_x.lora_down.weight",
    ),
    "bias difference": (lambda: GOOD | {f"{TO_Q}.diff_b": numbers(WIDTH)}, Cause.BIAS_DIFFERENCE, f"{TO_Q}.diff_b"),
    "bias of B": (
        lambda: GOOD | {f"{TO_Q}.lora_B.bias": numbers(WIDTH)},
        Cause.BIAS_DIFFERENCE,
        f"{TO_Q}.lora_B.bias",
    ),
    "control LoRA": (control_lora, Cause.CONTROL_LORA, "double_blocks.0.img_attn.norm.query_norm.scale"),
    "embeddings": (
        lambda: GOOD | {"bundle_emb.tok.string_to_param.*": numbers(2, 4)},
        Cause.TEXTUAL_INVERSION,
        "bundle_emb.tok.string_to_param.*",
    ),
    "two different copies": (
        lambda: GOOD | kohya("lora_transformer_transformer_blocks_0_attn_to_q", WIDTH, WIDTH, 4, seed=5),
        Cause.DUPLICATE_MODULE,
        "",
    ),
    "A alone": (lambda: without("B"), Cause.INCOMPLETE_PAIR, f"{TO_Q}.lora_A.weight"),
    "B alone": (lambda: without("A"), Cause.INCOMPLETE_PAIR, f"{TO_Q}.lora_B.weight"),
    "alpha alone": (
        lambda: GOOD | {f"{TO_K}.alpha": torch.tensor(1.0)},
        Cause.INCOMPLETE_PAIR,
        f"{TO_K}.alpha",
    ),
    "rank of A and of B": (
        lambda: {f"{TO_Q}.lora_A.weight": numbers(4, WIDTH), f"{TO_Q}.lora_B.weight": numbers(WIDTH, 6)},
        Cause.RANK_MISMATCH,
        f"{TO_Q}.lora_B.weight",
    ),
    "narrow A": (lambda: peft(TO_Q, WIDTH, 24, 4), Cause.SHAPE_MISMATCH, f"{TO_Q}.lora_A.weight"),
    "wide A": (lambda: peft(TO_Q, WIDTH, 40, 4), Cause.SHAPE_MISMATCH, f"{TO_Q}.lora_A.weight"),
    "B of one row": (lambda: peft(TO_Q, 1, WIDTH, 4), Cause.SHAPE_MISMATCH, f"{TO_Q}.lora_B.weight"),
    "fused B of another width": (
        lambda: kohya("lora_unet_single_blocks_0_linear1", 9 * WIDTH, WIDTH, 4),
        Cause.SHAPE_MISMATCH,
        "lora_unet_single_blocks_0_linear1.lora_up.weight",
    ),
    "vectors": (
        lambda: {f"{TO_Q}.lora_A.weight": numbers(WIDTH), f"{TO_Q}.lora_B.weight": numbers(WIDTH)},
        Cause.SHAPE_MISMATCH,
        f"{TO_Q}.lora_A.weight",
    ),
    "a convolution on a matrix": (
        lambda: {f"{TO_Q}.lora_A.weight": numbers(4, WIDTH, 3, 3), f"{TO_Q}.lora_B.weight": numbers(WIDTH, 4, 1, 1)},
        Cause.SHAPE_MISMATCH,
        f"{TO_Q}.lora_A.weight",
    ),
    "control LoRA's wide input": (
        lambda: peft("img_in", WIDTH, 8, 4),
        Cause.CONTROL_LORA,
        "img_in.lora_A.weight",
    ),
    "rank over the limit": (lambda: peft(TO_Q, WIDTH, WIDTH, 24), Cause.RANK_TOO_LARGE, f"{TO_Q}.lora_A.weight"),
    "alpha 0": (lambda: kohya(TO_Q, WIDTH, WIDTH, 4, 0), Cause.ALPHA_INVALID, f"{TO_Q}.alpha"),
    "alpha below 0": (lambda: kohya(TO_Q, WIDTH, WIDTH, 4, -4), Cause.ALPHA_INVALID, f"{TO_Q}.alpha"),
    "alpha NaN": (lambda: kohya(TO_Q, WIDTH, WIDTH, 4, float("nan")), Cause.NOT_FINITE, f"{TO_Q}.alpha"),
    "two alphas": (
        lambda: GOOD | {f"{TO_Q}.alpha": torch.ones(2)},
        Cause.ALPHA_INVALID,
        f"{TO_Q}.alpha",
    ),
    "NaN in A": (lambda: with_value(float("nan")), Cause.NOT_FINITE, f"{TO_Q}.lora_A.weight"),
    "Inf in B": (lambda: with_value(float("inf"), "B"), Cause.NOT_FINITE, f"{TO_Q}.lora_B.weight"),
    "NaN in float8": (
        lambda: {n: t.to(torch.float8_e4m3fn) for n, t in with_value(float("nan")).items()},
        Cause.NOT_FINITE,
        f"{TO_Q}.lora_A.weight",
    ),
    "F64 beyond F32": (
        lambda: {n: t.double() * 1e300 for n, t in GOOD.items()},
        Cause.NOT_FINITE,
        f"{TO_Q}.lora_A.weight",
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_cannot_be_applied_exactly_is_refused_by_cause_and_key(tmp_path: Path, name: str):
    build, cause, key = ADAPTERS[name]
    error = refuse(write_adapter(tmp_path / "a.safetensors", build()), max_rank=16)
    assert error.cause == cause.value
    if key:
        assert error.key == key
    assert "\n" not in error.message


@pytest.mark.parametrize(("value", "dtype", "cause"), [(1e6, "F16", Cause.OVERFLOW), (3.4e38, "BF16", Cause.OVERFLOW)])
def test_numbers_too_large_for_the_rows_are_refused(tmp_path: Path, value: float, dtype: str, cause: Cause):
    error = refuse(write_adapter(tmp_path / "a.safetensors", with_value(value)), dtype)
    assert (error.cause, error.key) == (cause.value, f"{TO_Q}.lora_A.weight")


def test_a_scaling_that_overflows_is_refused(tmp_path: Path):
    tensors = kohya(TO_Q, WIDTH, WIDTH, 4, alpha=3e38)
    error = refuse(
        write_adapter(
            tmp_path / "a.safetensors",
            {n: t * 8 for n, t in tensors.items() if "alpha" not in n} | {f"{TO_Q}.alpha": torch.tensor(3e38)},
        )
    )
    assert (error.cause, error.key) == ("OVERFLOW", f"{TO_Q}.lora_up.weight")


def test_numbers_too_small_for_the_rows_are_refused_when_they_are_many(tmp_path: Path):
    tiny = {name: one * 1e-9 for name, one in GOOD.items()}
    assert refuse(write_adapter(tmp_path / "a.safetensors", tiny), "F16").cause == "UNDERFLOW"
    path = write_adapter(tmp_path / "a.safetensors", with_value(1e-9))
    assert pack_file(path, flux_layout("F16")).rank == 4


METADATA: dict[str, tuple[str, Cause]] = {
    "no JSON": ("{", Cause.METADATA_INVALID),
    "deep JSON": ("[" * 100_000, Cause.METADATA_INVALID),
    "a list": ("[]", Cause.METADATA_INVALID),
    "rank Inf": ('{"transformer.r": Infinity}', Cause.ALPHA_CONFLICT),
    "alpha beyond floats": ('{"transformer.lora_alpha": 1' + "0" * 400 + "}", Cause.METADATA_INVALID),
    "alpha of null in a pattern": ('{"transformer.alpha_pattern": {"to_q": null}}', Cause.METADATA_INVALID),
    "alpha as text": ('{"transformer.lora_alpha": "8"}', Cause.METADATA_INVALID),
    "a regular expression": ('{"transformer.alpha_pattern": {"(a+)+$": 1}}', Cause.METADATA_INVALID),
    "a pattern without a module": ('{"transformer.alpha_pattern": {"to_nothing": 1}}', Cause.METADATA_INVALID),
    "another rank": ('{"transformer.r": 8}', Cause.ALPHA_CONFLICT),
    "another alpha": ('{"transformer.lora_alpha": 8}', Cause.ALPHA_CONFLICT),
    "rsLoRA beside a tensor alpha": (
        '{"transformer.lora_alpha": 2, "transformer.use_rslora": true}',
        Cause.ALPHA_CONFLICT,
    ),
    "alpha 0": ('{"transformer.lora_alpha": 0}', Cause.ALPHA_INVALID),
    "alpha NaN": ('{"transformer.lora_alpha": NaN}', Cause.ALPHA_INVALID),
    "DoRA": ('{"transformer.use_dora": true}', Cause.UNSUPPORTED_ALGORITHM),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_contradict_the_tensors_or_themselves_are_refused(tmp_path: Path, name: str):
    text, cause = METADATA[name]
    tensors = kohya(TO_Q, WIDTH, WIDTH, 4, alpha=2)
    path = write_adapter(tmp_path / "a.safetensors", tensors, {"lora_adapter_metadata": text})
    assert refuse(path).cause == cause.value


def test_two_modules_with_one_underscored_name_are_ambiguous(tmp_path: Path):
    modules = tuple(TargetModule("transformer", name, "linear", 8, 8) for name in ("a_b.c", "a.b_c"))
    path = write_adapter(tmp_path / "a.safetensors", kohya("lora_unet_a_b_c", 8, 8, 2))
    with pytest.raises(AdapterRejected) as refused:
        pack_file(path, Layout("tiny", "Other", "F32", modules))
    assert (refused.value.cause, refused.value.key) == ("AMBIGUOUS_MODULE", "lora_unet_a_b_c.lora_down.weight")


def test_the_message_for_a_foreign_file_says_where_it_probably_belongs(tmp_path: Path):
    tensors = {}
    for block in range(3):
        tensors |= kohya(f"lora_unet_blocks_{block}_self_attn_q", WIDTH, WIDTH, 4, 4)
    error = refuse(write_adapter(tmp_path / "a.safetensors", tensors))
    assert "3 of 3 modules match wan2.1-t2v-1.3b, 0 match" in error.message


def test_every_cause_has_a_remedy():
    assert set(REMEDIES) == set(Cause)
    assert all(REMEDIES.values())


def test_a_wrong_shape_is_told_with_both_shapes(tmp_path: Path):
    tensors = {f"{TO_Q}.lora_A.weight": numbers(4, 24), f"{TO_Q}.lora_B.weight": numbers(WIDTH, 4)}
    assert "[4, 24]" in (message := refuse(write_adapter(tmp_path / "a.safetensors", tensors)).message)
    assert "[4, 32]" in message
