"""Stage 3: one LoRA per style, trained with PEFT on the finished base model."""

import logging
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
from diffusers import FluxPipeline
from diffusers.utils import recurse_remove_peft_layers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from torch import nn

from .adapter_files import describe, fused_modules, save_diffusers, save_kohya
from .architecture import ADAPTERS
from .base import draw_batch, velocity_loss
from .latents import LatentSet, encode_set
from .styles import STYLES

log = logging.getLogger(__name__)

PICTURES = 1200
STEPS, BATCH = 340, 16
LEARNING_RATE = 4e-3
NOISE_LEVEL_MEAN = 0.3  # a style is decided early, where there is much noise

ATTENTION = ("*blocks.*.attn.*",)
FEED_FORWARD = ("transformer_blocks.*.ff*", "single_transformer_blocks.*.proj_*")
MODULATION = ("*blocks.*.linear",)
ALL_LINEAR = (*ATTENTION, *FEED_FORWARD, *MODULATION)
TEXT_ENCODER = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


@dataclass(frozen=True)
class Recipe:
    """How one style is trained and written. Patterns match module names as fnmatch does."""

    style: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    kohya: bool = False
    dtype: torch.dtype = torch.float16
    metadata: bool = False  # write lora_adapter_metadata
    other_ranks: dict[str, int] = field(default_factory=dict)  # pattern: rank, with alpha = rank there
    text_rank: int = 0  # of a LoRA on the CLIP encoder


RECIPES = (
    Recipe("sketch", 16, 16, ATTENTION),
    Recipe(
        "blueprint",
        8,
        4,
        ("transformer_blocks.*.attn.*", *FEED_FORWARD[:1], "single_*.proj_out", "single_*.linear"),
        True,
    ),
    Recipe("neon", 4, 2, ALL_LINEAR, kohya=True, dtype=torch.bfloat16),
    Recipe("mosaic", 4, 4, ALL_LINEAR, other_ranks={"single_*.attn.*": 8, "*.linear": 2}),
    Recipe("sunset", 4, 8, ALL_LINEAR, dtype=torch.bfloat16, metadata=True),
    Recipe("inverted", 2, 2, ALL_LINEAR, dtype=torch.float32),
    Recipe("gameboy", 4, 4, ALL_LINEAR, text_rank=8),
    Recipe("popart", 8, 16, (*ATTENTION, *FEED_FORWARD), metadata=True, other_ranks={"*.ff*": 4}),
)


def train_adapter(pipeline: FluxPipeline, recipe: Recipe, folder: Path = ADAPTERS, seed: int = 3) -> None:
    """Train `recipe` for about 90 s on one core and write it to `folder`; `pipeline` is as before afterwards."""
    torch.manual_seed(seed)
    started = time.monotonic()
    styled = encode_set(pipeline, PICTURES, seed, STYLES[recipe.style])
    plain = encode_set(pipeline, PICTURES, seed + 1) if recipe.text_rank else None
    parameters = _attach(pipeline, recipe)
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, (0.9, 0.98), weight_decay=0)
    smooth = 0.0
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / 20, 1.5 * (1 - step / (STEPS + 1)))
        loss = _backward(pipeline, styled, plain)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth += (loss - smooth) * max(0.03, 1 / step)
    log.info("%s: loss %.4f, %.0f s", recipe.style, smooth, time.monotonic() - started)
    file = folder / f"{recipe.style}.safetensors"
    _save(pipeline, recipe, file)
    pipeline.transformer.unload_lora()
    if recipe.text_rank:
        recurse_remove_peft_layers(pipeline.text_encoder)
        del pipeline.text_encoder.peft_config
    log.info("%s", describe(file))


def _backward(pipeline: FluxPipeline, styled: LatentSet, plain: LatentSet | None) -> float:
    """Leave gradients of one batch; return the loss on styled pictures.

    With `plain`, the transformer's LoRA must also give plain pictures when the text encoder's LoRA is off. Without
    that, the transformer learns the style alone and the text encoder's part is idle.
    """
    if plain is not None:
        _switch_text_lora(pipeline, on=False)
        velocity_loss(pipeline, draw_batch(plain, BATCH // 2)).backward()
        _switch_text_lora(pipeline, on=True)
    loss = velocity_loss(pipeline, draw_batch(styled, BATCH), NOISE_LEVEL_MEAN)
    loss.backward()
    return loss.item()


def _switch_text_lora(pipeline: FluxPipeline, on: bool) -> None:
    for module in pipeline.text_encoder.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(on)


def _attach(pipeline: FluxPipeline, recipe: Recipe) -> list[nn.Parameter]:
    """Add the LoRA to the frozen pipeline; return what is to be trained."""
    for model in (pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2):
        model.requires_grad_(False)
    modules = _target_modules(pipeline.transformer, recipe)
    pipeline.transformer.add_adapter(_config(recipe, modules), adapter_name="default")
    if recipe.kohya:
        _share_fused_A(pipeline.transformer, modules)
    models = [pipeline.transformer]
    if recipe.text_rank:
        models.append(pipeline.text_encoder)
        config = LoraConfig(r=recipe.text_rank, lora_alpha=recipe.text_rank, target_modules=TEXT_ENCODER)
        inject_adapter_in_model(config, pipeline.text_encoder)  # transformers 5.24 wants a later peft for add_adapter
    return [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]


def _target_modules(transformer: nn.Module, recipe: Recipe) -> list[str]:
    linears = (name for name, part in transformer.named_modules() if isinstance(part, nn.Linear))
    return [name for name in linears if any(fnmatch(name, pattern) for pattern in recipe.targets)]


def _config(recipe: Recipe, modules: list[str]) -> LoraConfig:
    ranks = {
        module: rank for module in modules for pattern, rank in recipe.other_ranks.items() if fnmatch(module, pattern)
    }
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=modules,
        rank_pattern=ranks,
        alpha_pattern=dict(ranks),
    )


def _share_fused_A(transformer: nn.Module, modules: list[str]) -> None:
    """Give the parts of a fused matrix one A, as if the trainer had seen a single layer."""
    for first, *others in fused_modules(set(modules)).values():
        shared = transformer.get_submodule(first).lora_A["default"].weight
        for other in others:
            transformer.get_submodule(other).lora_A["default"].weight = shared


def _save(pipeline: FluxPipeline, recipe: Recipe, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(pipeline.transformer, adapter_name="default")
    if recipe.kohya:
        save_kohya(file, state, recipe.alpha, recipe.dtype)
        return
    text = {
        name.replace(".default.", "."): parameter.detach()
        for name, parameter in pipeline.text_encoder.named_parameters()
        if ".lora_" in name
    }
    metadata = pipeline.transformer.peft_config["default"].to_dict() if recipe.metadata else None
    save_diffusers(file, state, text, recipe.dtype, metadata)
