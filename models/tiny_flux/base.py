"""Stage 2: transformer and text encoders learn together to draw the prompt, by flow matching."""

import copy
import logging
import time
from collections.abc import Callable, Iterator

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from .architecture import TOKENS
from .latents import LatentSet, encode_set, token_ids
from .muon import Schedule

log = logging.getLogger(__name__)

PICTURES = 10_000
STEPS, BATCH = 3900, 32
EMPTY_PROMPTS = 0.1
AVERAGE_DECAY = 0.998
MATRIX_RATE, OTHER_RATE = 3e-3, 1.5e-3


def velocity_loss(pipeline: FluxPipeline, batch: LatentSet, noise_level_mean: float = 0.0) -> Tensor:
    """Mean squared error of the predicted velocity (noise - latents) at logit-normal noise levels."""
    clean = batch.latents
    noise = torch.randn_like(clean)
    level = torch.sigmoid(torch.randn(len(clean)) + noise_level_mean)
    noisy = torch.lerp(clean, noise, level.view(-1, 1, 1))
    predicted = pipeline.transformer(
        hidden_states=noisy,
        encoder_hidden_states=pipeline.text_encoder_2(batch.t5_ids)[0],
        pooled_projections=pipeline.text_encoder(batch.clip_ids).pooler_output,
        timestep=level,
        img_ids=FluxPipeline._prepare_latent_image_ids(1, 8, 8, "cpu", torch.float32),
        txt_ids=torch.zeros(TOKENS, 3),
        return_dict=False,
    )[0]
    return (predicted - (noise - clean)).square().mean()


def draw_batch(pictures: LatentSet, size: int, empty: LatentSet | None = None) -> LatentSet:
    """`size` random rows; with `empty` (one row, the empty prompt) one prompt in ten is left out."""
    rows = torch.randint(len(pictures), (size,))
    clip_ids, t5_ids = pictures.clip_ids[rows], pictures.t5_ids[rows]
    if empty is not None:
        dropped = torch.rand(size, 1) < EMPTY_PROMPTS
        clip_ids = torch.where(dropped, empty.clip_ids, clip_ids)
        t5_ids = torch.where(dropped, empty.t5_ids, t5_ids)
    return LatentSet(pictures.latents[rows], clip_ids, t5_ids)


def trained_parameters(pipeline: FluxPipeline) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of the three models of this stage."""
    for model in (pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2):
        yield from model.named_parameters()


def train_base(pipeline: FluxPipeline, publish: Callable[[FluxPipeline, int], None], seed: int = 2) -> float:
    """Train for about 45 minutes on one core; leave the averaged weights in `pipeline` and return the last loss.

    Every 500 steps `publish` gets a copy with the weights averaged so far, and the number of steps.
    """
    torch.manual_seed(seed)
    started = time.monotonic()
    pictures = encode_set(pipeline, PICTURES, seed)
    empty = LatentSet(pictures.latents[:1], token_ids(pipeline.tokenizer, [""]), token_ids(pipeline.tokenizer_2, [""]))
    log.info("base: %d pictures encoded, %.0f s", PICTURES, time.monotonic() - started)
    parameters = list(trained_parameters(pipeline))
    averages = [parameter.detach().clone() for _, parameter in parameters]
    schedule = Schedule(parameters, lr=MATRIX_RATE, adam_lr=OTHER_RATE, steps=STEPS)
    smooth = 2.0
    for step in range(1, STEPS + 1):
        loss = velocity_loss(pipeline, draw_batch(pictures, BATCH, empty))
        loss.backward()
        schedule.step()
        _average(averages, parameters, step)
        smooth += (loss.item() - smooth) * max(0.02, 1 / step)
        if step % 100 == 0:
            log.info("base step %d loss %.4f, %.0f s", step, smooth, time.monotonic() - started)
        if step % 500 == 0 and step < STEPS:
            publish(_averaged_copy(pipeline, averages), step)
    _load(pipeline, averages)
    return smooth


@torch.no_grad()
def _average(averages: list[Tensor], parameters: list[tuple[str, nn.Parameter]], step: int) -> None:
    decay = min(AVERAGE_DECAY, step / (step + 10))
    torch._foreach_lerp_(averages, [parameter for _, parameter in parameters], 1 - decay)


@torch.no_grad()
def _load(pipeline: FluxPipeline, averages: list[Tensor]) -> None:
    for (_, parameter), average in zip(trained_parameters(pipeline), averages, strict=True):
        parameter.copy_(average)


def _averaged_copy(pipeline: FluxPipeline, averages: list[Tensor]) -> FluxPipeline:
    """A second pipeline with the averaged weights; training goes on in the first."""
    models = {name: copy.deepcopy(model) for name, model in pipeline.components.items()}
    averaged = FluxPipeline(**{name: model for name, model in models.items() if model is not None})
    _load(averaged, averages)
    return averaged
