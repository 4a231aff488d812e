"""The good files that the fuzzer starts from: every algorithm, dialect and source of alpha on two small models."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors.torch import save

from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import Tensors, clip_modules, flux_modules, numbers, peft, t5_modules, unet_layout

D = 8
BLOCK, SINGLE = "transformer_blocks.0", "single_transformer_blocks.0"
CONV = "lora_unet_down_blocks_0_resnets_0_conv1"


def small_flux() -> Layout:
    """A Flux of width 8 with both text encoders."""
    parts = {"text_encoder": clip_modules(), "text_encoder_2": t5_modules()}
    rows = [("transformer", *row) for row in flux_modules(D) if "time_text" not in row[0]]
    rows += [(component, *row) for component, modules in parts.items() for row in modules]
    return Layout("tiny/flux", "FluxPipeline", "F32", tuple(TargetModule(c, n, "linear", i, o) for c, n, i, o in rows))


FLUX, UNET = small_flux(), unet_layout()


@dataclass(frozen=True)
class Seed:
    """A good file for one layout."""

    name: str
    content: bytes
    layout: Layout


def alpha(value: float) -> torch.Tensor:
    return torch.tensor(value)


def pair(stem: str, out: int, inputs: int, rank: int, a: float | None = None, seed: int = 0) -> Tensors:
    """kohya's names."""
    tensors = {f"{stem}.lora_down.weight": numbers(rank, inputs, seed=seed)}
    tensors |= {f"{stem}.lora_up.weight": numbers(out, rank, seed=seed + 1)}
    return tensors | ({} if a is None else {f"{stem}.alpha": alpha(a)})


def shaped(stem: str, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Random tensors by the ends of their names; `alpha` is a number."""
    return {
        f"{stem}.{end}": numbers(*shape, seed=index).abs() if end == "alpha" else numbers(*shape, seed=index)
        for index, (end, shape) in enumerate(shapes.items())
    }


def _flux() -> dict[str, tuple[Tensors, dict[str, str]]]:
    q = f"transformer.{BLOCK}.attn.to_q"
    loha = {"hada_w1_a": (D, 2), "hada_w1_b": (2, D), "hada_w2_a": (D, 2), "hada_w2_b": (2, D), "alpha": ()}
    whole = {"lokr_w1": (2, 2), "lokr_w2": (4, 4), "alpha": ()}
    split = {"lokr_w1_a": (2, 1), "lokr_w1_b": (1, 4), "lokr_w2_a": (4, 1), "lokr_w2_b": (1, 2), "alpha": ()}
    peft_notes = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.alpha_pattern": {"to_k": 2}}
    rs = {"transformer.lora_alpha": 6, "transformer.use_rslora": True}
    k = peft(f"transformer.{BLOCK}.attn.to_k", D, D, 4)
    return {
        "peft": (peft(q, D, D, 4) | k, {"format": "pt"}),
        "peft, ranks": (peft(q, D, D, 2) | peft(f"transformer.{SINGLE}.proj_mlp", 4 * D, D, 5), {}),
        "peft, alpha noted": (peft(q, D, D, 4) | k, {"lora_adapter_metadata": json.dumps(peft_notes)}),
        "peft, rsLoRA noted": (peft(q, D, D, 4), {"lora_adapter_metadata": json.dumps(rs)}),
        "kohya, fused": (pair("lora_unet_double_blocks_0_img_attn_qkv", 3 * D, D, 3, 1.5), {}),
        "kohya, single": (pair("lora_unet_single_blocks_0_linear1", 7 * D, D, 2, 1.0), {"ss_network_dim": "2"}),
        "kohya, swapped": (pair("lora_unet_final_layer_adaLN_modulation_1", 2 * D, D, 2, 1.0), {}),
        "kohya, encoders": (
            pair("lora_te1_text_model_encoder_layers_0_mlp_fc1", 96, 24, 2, 2.0)
            | pair("lora_te2_encoder_block_0_layer_0_SelfAttention_q", 40, 40, 2),
            {},
        ),
        "BFL names": (peft("diffusion_model.double_blocks.0.txt_mlp.0", 4 * D, D, 3), {}),
        "pieces": (pair("transformer.single_blocks.0.linear1.3", 4 * D, D, 2, 2.0), {}),
        "zero extras": (
            peft(q, D, D, 2) | {f"{q}.diff_b": torch.zeros(D), "transformer.norm.diff": torch.zeros(D)},
            {},
        ),
        "XLabs": (
            {
                "double_blocks.0.processor.qkv_lora1.down.weight": numbers(2, D),
                "double_blocks.0.processor.qkv_lora1.up.weight": numbers(3 * D, 2),
            },
            {},
        ),
        "LoHa": (shaped("lycoris_transformer_blocks_0_attn_to_q", loha), {}),
        "LoKr, whole": (shaped("lycoris_transformer_blocks_0_attn_to_q", whole), {}),
        "LoKr, in factors": (shaped(f"diffusion_model.{BLOCK}.attn.to_q", split), {}),
        "full difference": ({f"transformer.{BLOCK}.attn.to_v.diff": numbers(D, D)}, {}),
        "F16": ({name: tensor.half() for name, tensor in peft(q, D, D, 2).items()}, {}),
        "BF16 and F64": ({n: t.bfloat16() if "A" in n else t.double() for n, t in peft(q, D, D, 2).items()}, {}),
        "F8": ({name: tensor.to(torch.float8_e4m3fn) for name, tensor in peft(q, D, D, 2).items()}, {}),
        "F8 of the other kind": ({n: t.to(torch.float8_e5m2) for n, t in peft(q, D, D, 2).items()}, {}),
        "two copies": (peft(q, D, D, 2) | {n.replace(q, q[12:]): t for n, t in peft(q, D, D, 2).items()}, {}),
    }


def _unet() -> dict[str, tuple[Tensors, dict[str, str]]]:
    loha = {"hada_w1_a": (2, 16), "hada_w1_b": (2, 8), "hada_t1": (2, 2, 3, 3)}
    loha |= {"hada_w2_a": (2, 16), "hada_w2_b": (2, 8), "hada_t2": (2, 2, 3, 3), "alpha": ()}
    flat = {"hada_w1_a": (16, 2), "hada_w1_b": (2, 72), "hada_w2_a": (16, 2), "hada_w2_b": (2, 72)}
    tucker = {"lora_down.weight": (3, 8, 1, 1), "lora_mid.weight": (3, 3, 3, 3), "lora_up.weight": (16, 3, 1, 1)}
    lokr = {"lokr_w1": (2, 2), "lokr_w2_a": (2, 8), "lokr_w2_b": (2, 4), "lokr_t2": (2, 2, 3, 3), "alpha": ()}
    conv = {"lora_down.weight": (4, 8, 3, 3), "lora_up.weight": (16, 4, 1, 1), "alpha": ()}
    whole = {"lokr_w1": (4, 2), "lokr_w2": (4, 4, 3, 3)}
    return {
        "LoCon": (shaped(CONV, conv) | pair("lora_unet_down_blocks_0_attentions_0_proj_in", 16, 16, 2), {}),
        "Tucker": (shaped(CONV, tucker | {"alpha": ()}), {}),
        "LoHa of a convolution": (shaped(CONV, loha), {}),
        "LoHa, flat": (shaped(CONV, flat), {}),
        "LoKr of a convolution": (shaped(CONV, lokr), {}),
        "LoKr, whole kernel": (shaped(CONV, whole), {}),
        "old diffusers": (
            {
                "unet.down_blocks.0.attentions.0.proj_in.lora.down.weight": numbers(2, 16),
                "unet.down_blocks.0.attentions.0.proj_in.lora.up.weight": numbers(16, 2),
            },
            {},
        ),
        "full kernel": ({"diffusion_model.down_blocks.0.resnets.0.conv1.diff": numbers(16, 8, 3, 3)}, {}),
    }


def seeds() -> list[Seed]:
    """All of them, in a fixed order."""
    makers: list[tuple[Callable[[], dict[str, tuple[Tensors, dict[str, str]]]], Layout]] = [
        (_flux, FLUX),
        (_unet, UNET),
    ]
    return [
        Seed(name, save({n: t.contiguous() for n, t in tensors.items()}, metadata or None), layout)
        for make, layout in makers
        for name, (tensors, metadata) in make().items()
    ]


def choose(chance: random.Random, among: list[Seed]) -> Seed:
    """One seed; now and then for a layout of another dtype."""
    seed = chance.choice(among)
    dtype = chance.choice(("F32", "F32", "F32", "BF16", "F16"))
    layout = Layout(seed.layout.base_model, seed.layout.family, dtype, seed.layout.modules)
    return Seed(seed.name, seed.content, layout)
