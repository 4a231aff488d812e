"""Any mixture of factors, of any algorithms, shapes and numbers: rows with every tensor accounted for, or a refusal."""

import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store.options import PackOptions
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import fit_adapter, write_adapter

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
STEMS = (
    "transformer.x_embedder",
    "lora_unet_double_blocks_0_img_attn_qkv",
    "transformer.transformer_blocks.0.attn.to_q",
    "diffusion_model.conv",
    "lora_te1_text_model_encoder_layers_0_mlp_fc1",
    "unet.elsewhere",
)
PARTS = (
    *("lora_A.weight", "lora_B.weight", "lora_down.weight", "lora_up.weight", "lora_mid.weight", "alpha"),
    *(f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(f"lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")),
    *("diff", "diff_b", "w_norm", "dora_scale", "weight"),
)
SETS = (
    *(("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight", "lora_mid.weight", "alpha")),
    *(("lokr_w1", "lokr_w2"), ("lokr_w1_a", "lokr_w1_b", "lokr_w2", "alpha"), ("diff",), ("diff", "diff_b")),
    ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"),
    ("lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
)
SIZES = st.sampled_from([1, 2, 2, 3, 4, 4, 4, 12])
SHAPES = st.one_of(
    st.tuples(SIZES), st.tuples(SIZES, SIZES), st.tuples(SIZES, SIZES), st.tuples(SIZES, SIZES, SIZES, SIZES)
)
VALUES = st.sampled_from([0.0, 1.0, 1.0, 1.0, 1e-9, 1e4, 3e19, float("nan"), float("inf")])


@st.composite
def files(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = {}
    for _ in range(draw(st.integers(1, 3))):
        stem = draw(st.sampled_from(STEMS))
        for part in draw(st.one_of(st.sampled_from(SETS), st.lists(st.sampled_from(PARTS), max_size=3))):
            shape = () if part == "alpha" else draw(SHAPES)
            numbers = torch.randn(shape, generator=generator) * draw(VALUES)
            tensors[f"{stem}.{part}"] = numbers.abs() if part == "alpha" else numbers
    return tensors


OPTIONS = st.builds(
    PackOptions,
    waived=st.sampled_from([(), ("bias",), ("norm", "text_encoder"), ("transformer",)]),
    max_rank=st.sampled_from([0, 1, 2, 3]),
    max_error=st.sampled_from([0.0, 0.3, 0.999]),
)


@given(files(), OPTIONS)
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
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
