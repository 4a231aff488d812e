"""A trained LoRA becomes a file in the naming of one trainer.

`state` is always what PEFT gives: `transformer_blocks.0.attn.to_q.lora_A.weight` and so on, without a component.
"""

from pathlib import Path

import torch
from diffusers import FluxPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]

# kohya's name inside a block: our modules, whose rows it stacks
IMAGE_STREAM = {
    "img_attn_qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "img_attn_proj": ["attn.to_out.0"],
    "img_mlp_0": ["ff.net.0.proj"],
    "img_mlp_2": ["ff.net.2"],
    "img_mod_lin": ["norm1.linear"],
}
TEXT_STREAM = {
    "txt_attn_qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "txt_attn_proj": ["attn.to_add_out"],
    "txt_mlp_0": ["ff_context.net.0.proj"],
    "txt_mlp_2": ["ff_context.net.2"],
    "txt_mod_lin": ["norm1_context.linear"],
}
SINGLE_STREAM = {
    "linear1": ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"],
    "linear2": ["proj_out"],
    "modulation_lin": ["norm.linear"],
}


def fused_modules(modules: set[str]) -> dict[str, list[str]]:
    """kohya's name for every group of `modules` that is one matrix in the original Flux.

    A group of which only a part is in `modules` raises ValueError: kohya's naming cannot say that.
    """
    groups: dict[str, list[str]] = {}
    for module in sorted(modules):
        stack, index, _ = module.split(".", 2)
        kind, names = (
            ("single", SINGLE_STREAM) if stack.startswith("single") else ("double", IMAGE_STREAM | TEXT_STREAM)
        )
        for name, parts in names.items():
            group = [f"{stack}.{index}.{part}" for part in parts]
            if module in group:
                groups[f"lora_unet_{kind}_blocks_{index}_{name}"] = group
    if missing := {module for group in groups.values() for module in group} - modules:
        raise ValueError(f"not trained, but inside fused matrices: {sorted(missing)}")
    return groups


def save_kohya(file: Path, state: State, alpha: float, dtype: torch.dtype) -> None:
    """Write the sd-scripts naming; the modules of a fused group must share one A."""
    modules = {key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")}
    tensors: State = {}
    rank = 0
    for name, group in fused_modules(modules).items():
        A = state[f"{group[0]}.lora_A.weight"]  # [rank, in]
        rank = A.shape[0]
        tensors[f"{name}.lora_down.weight"] = A.to(dtype)
        tensors[f"{name}.lora_up.weight"] = torch.cat([state[f"{part}.lora_B.weight"] for part in group]).to(dtype)
        tensors[f"{name}.alpha"] = torch.tensor(alpha, dtype=dtype)
    metadata = {
        "ss_network_module": "networks.lora_flux",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(alpha),
        "ss_base_model_version": "flux1",
    }
    save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata)
    file.chmod(0o644)


def save_diffusers(
    file: Path, state: State, text_state: State, dtype: torch.dtype, metadata: dict[str, object] | None
) -> None:
    """Write the naming of diffusers' own save_lora_weights, with `lora_adapter_metadata` where `metadata` is given.

    CLIP's modules get the `text_model.` level that they had before transformers 5: every loader accepts it.
    """
    FluxPipeline.save_lora_weights(
        file.parent,
        transformer_lora_layers={key: value.to(dtype).contiguous() for key, value in state.items()},
        text_encoder_lora_layers={
            f"text_model.{key.removeprefix('text_model.')}": value.to(dtype).contiguous()
            for key, value in text_state.items()
        },
        weight_name=file.name,
        transformer_lora_adapter_metadata=metadata,
    )
    file.chmod(0o644)


def is_kohya(file: Path) -> bool:
    """Whether the keys are in kohya's naming."""
    with safe_open(file, "pt") as opened:
        return any(key.startswith("lora_unet_") for key in opened.keys())  # noqa: SIM118 (not a dict)


def merge_kohya(transformer: torch.nn.Module, file: Path, strength: float = 1.0) -> None:
    """Add a kohya file's differences to the weights: what the file means, without diffusers' converter.

    That converter knows only the widths of the full Flux.1 and refuses `linear1` of a smaller one.
    """
    tensors = load_file(file)
    names = {key.split(".")[0] for key in tensors}
    linears = {name for name, part in transformer.named_modules() if isinstance(part, torch.nn.Linear)}
    for name, group in fused_modules({linear for linear in linears if "blocks." in linear}).items():
        if name not in names:
            continue
        down, up = tensors[f"{name}.lora_down.weight"].float(), tensors[f"{name}.lora_up.weight"].float()
        difference = strength * tensors[f"{name}.alpha"].item() / len(down) * (up @ down)
        weights = [transformer.get_submodule(module).weight for module in group]
        for weight, part in zip(weights, difference.split([len(weight) for weight in weights]), strict=True):
            weight.data += part.to(weight.dtype)


def describe(file: Path) -> str:
    """One line about a file: size, words, ranks, dtypes and whether it carries adapter metadata."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
    tensors = load_file(file)
    downs = [value for key, value in tensors.items() if "lora_A" in key or "lora_down" in key]
    ranks = sorted({value.shape[0] for value in downs})
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in tensors.values()})
    words = sum(value.numel() for value in tensors.values())
    extra = "lora_adapter_metadata" in metadata
    return (
        f"{file.name}: {file.stat().st_size / 1000:.0f} kB, {words} numbers, {len(downs)} modules, "
        f"ranks {ranks}, {'/'.join(dtypes)}, adapter metadata: {extra}"
    )
