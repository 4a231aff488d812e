"""Any mixture of factors, of any algorithms, shapes and numbers: rows with every tensor accounted for, or a refusal."""

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from loraplex.pack_options import PackOptions
from tests.adapter_store.samples import fit_adapter, peft, write_adapter

LAYOUT = Layout(
    "tiny",
    "FluxPipeline",
    "F16",
    (
        TargetModule("transformer", "x_embedder", "linear", 4, 4),
        *(TargetModule("transformer", f"transformer_blocks.0.attn.to_{n}", "linear", 4, 4) for n in "qkv"),
        TargetModule("transformer", "conv", "conv2d", 2, 4, (3, 3)),
        TargetModule("text_encoder", "encoder.layers.0.mlp.fc1", "linear", 4, 6),
    ),
)
# stem -> rows, columns and kernel of what it leads to
STEMS = {
    "transformer.x_embedder": (4, 4, (1, 1)),
    "lora_unet_double_blocks_0_img_attn_qkv": (12, 4, (1, 1)),
    "transformer.transformer_blocks.0.attn.to_q": (4, 4, (1, 1)),
    "diffusion_model.conv": (4, 2, (3, 3)),
    "lora_te1_text_model_encoder_layers_0_mlp_fc1": (6, 4, (1, 1)),
    "unet.elsewhere": (4, 4, (1, 1)),
}
PARTS = (
    *("lora_A.weight", "lora_B.weight", "lora_down.weight", "lora_up.weight", "lora_mid.weight", "alpha"),
    *(f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(f"lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")),
    *("diff", "diff_b", "w_norm", "dora_scale", "weight"),
)
SETS = (
    *(("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight", "alpha"), ("diff",)),
    ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"),
    *(("lokr_w1", "lokr_w2", "alpha"), ("lokr_w1", "lokr_w2_a", "lokr_w2_b"), ("diff", "diff_b")),
)
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 12]), min_size=1, max_size=4).map(tuple)
# Mostly numbers as trained ones, and rarely each of what may go wrong.
VALUES = st.sampled_from([1.0] * 12 + [0.0, 1e-9, 1e4, 3e19, float("nan"), float("inf")])
IS_RARE = st.sampled_from([False] * 9 + [True])


def right_shape(stem: str, part: str, rank: int) -> tuple[int, ...]:
    """The shape that fits."""
    out, inputs, kernel = STEMS[stem]
    suffix = kernel if kernel != (1, 1) else ()
    half = (out // 2, inputs // 2)
    shapes = {
        **dict.fromkeys(("lora_A.weight", "lora_down.weight"), (rank, inputs, *suffix)),
        **dict.fromkeys(("lora_B.weight", "lora_up.weight"), (out, rank)),
        **dict.fromkeys(("hada_w1_a", "hada_w2_a"), (out, rank)),
        **dict.fromkeys(("hada_w1_b", "hada_w2_b"), (rank, inputs * kernel[0] * kernel[1])),
        **{"lokr_w1": (2, 2), "lokr_w2": (*half, *suffix), "lokr_w2_a": (half[0], rank)},
        **{"lokr_w2_b": (rank, half[1] * kernel[0] * kernel[1]), "diff": (out, inputs, *suffix), "diff_b": (out,)},
    }
    return shapes.get(part, (rank, rank))


@st.composite
def files(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = {}
    for _ in range(draw(st.integers(1, 3))):
        stem, rank = draw(st.sampled_from(list(STEMS)[: 6 if draw(IS_RARE) else 5])), draw(st.integers(1, 6))
        parts = draw(st.lists(st.sampled_from(PARTS), max_size=3) if draw(IS_RARE) else st.sampled_from(SETS))
        for part in parts:
            shape = draw(SHAPES) if draw(IS_RARE) and draw(IS_RARE) else right_shape(stem, part, rank)
            numbers = torch.randn(() if part == "alpha" else shape, generator=generator) * draw(VALUES)
            tensors[f"{stem}.{part}"] = numbers.abs() if part == "alpha" else numbers
    return tensors


OPTIONS = st.builds(
    PackOptions,
    waived=st.sampled_from([(), ("bias",), ("norm", "text_encoder"), ("transformer",)]),
    max_rank=st.sampled_from([0, 1, 2, 3]),
    max_error=st.sampled_from([0.0, 0.3, 0.999]),
)


@given(files(), OPTIONS)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_factors_of_any_kind_end_in_rows_or_in_a_refusal(tensors: dict[str, torch.Tensor], options: PackOptions):
    if not tensors:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_adapter(Path(folder) / "a.safetensors", tensors)
        try:
            packed = fit_adapter(path, LAYOUT, max_rank=8, options=options).packed
        except AdapterRejected as refused:
            assert refused.cause
            assert refused.message
            return
    assert np.isfinite(packed.rows).all()
    assert 1 <= packed.rank <= options.limit(8)
    assert 0 <= packed.error <= options.max_error
    assert not math.isnan(packed.error)


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580, 0x8B1F])
def test_the_length_of_a_header_is_not_taken_for_another_kind_of_file(tmp_path: Path, length: int):
    """A header of 640 bytes begins with the bytes of a pickle, one of 35615 with those of a gzip archive."""
    path = write_adapter(tmp_path / "a.safetensors", peft("transformer.x_embedder", 4, 4, 2))
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + content[8:end].ljust(length) + content[end:])
    assert fit_adapter(path, LAYOUT).packed.rank == 2
