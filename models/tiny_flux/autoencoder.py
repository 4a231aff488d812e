"""Stage 1: pictures to latents and back.

The transformer can draw only what the decoder can show, so this stage sees all that will be drawn later: base
pictures, every style, mixtures of two styles, and wild colours.
"""

import logging
import random
import time

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional

from .muon import Schedule
from .rendering import Array, Picture, render
from .styles import STYLES
from .vocabulary import Subject, object_subjects, shape_subjects

log = logging.getLogger(__name__)

POOL = 4000
CROP_PX = 32
CROP_STEPS, CROP_BATCH = 2200, 16
WHOLE_STEPS, WHOLE_BATCH = 700, 8
LATENT_NOISE = 0.08  # of the latents' standard deviation: the decoder must forgive an imperfect transformer


def to_tensor(images: list[Array]) -> Tensor:
    """`images` of [64, 64, 3] from 0 to 1 as one tensor [n, 3, 64, 64] from -1 to 1."""
    stacked = torch.from_numpy(np.stack(images).astype(np.float32))
    return stacked.permute(0, 3, 1, 2).contiguous() * 2 - 1


def draw_subject(rng: random.Random) -> Subject:
    """An object three times out of five, else a shape."""
    return rng.choice(object_subjects() if rng.random() < 0.6 else shape_subjects())


def training_image(rng: random.Random) -> Array:
    """One picture as the autoencoder should know it: plain, styled, two styles mixed, or in wild colours."""
    picture = render(draw_subject(rng), rng)
    kind = rng.random()
    if kind < 0.35:
        return picture.rgb
    if kind < 0.75:
        return rng.choice(list(STYLES.values()))(picture)
    if kind < 0.9:
        return _mixture(picture, rng)
    return _wild_colours(picture, rng)


def _mixture(picture: Picture, rng: random.Random) -> Array:
    """One style on top of another, half of the time faded into the first."""
    first, second = rng.sample(list(STYLES.values()), 2)
    below = first(picture)
    above = second(Picture(np.clip(below, 0, 1).astype(np.float32), picture.mask))
    part = 1.0 if rng.random() < 0.5 else rng.uniform(0.3, 0.7)
    return above * part + below * (1 - part)


def _wild_colours(picture: Picture, rng: random.Random) -> Array:
    noise = np.random.default_rng(rng.getrandbits(32))
    mixing = noise.normal(0, 0.6, (3, 3)) + 0.3 * np.eye(3)
    return np.clip((picture.rgb - 0.5) @ mixing + noise.uniform(0.3, 0.7, 3), 0, 1).astype(np.float32)


def reconstruction_loss(decoded: Tensor, target: Tensor) -> Tensor:
    """Absolute and squared error, and the absolute error of the slopes, which keeps edges sharp."""
    error = decoded - target
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return error.abs().mean() + 2 * error.square().mean() + across + down


def psnr(decoded: Tensor, target: Tensor) -> float:
    """Mean over the images, in dB, for values from -1 to 1."""
    errors = (decoded.clamp(-1, 1) - target).square().flatten(1).mean(1).clamp(min=1e-8)
    return float((10 * torch.log10(4 / errors)).mean())


def train_autoencoder(vae: AutoencoderKL, seed: int = 1) -> None:
    """Train `vae` in place, about a quarter of an hour on one core, and normalise its latents."""
    rng, started = random.Random(seed), time.monotonic()
    torch.manual_seed(seed)
    pool = to_tensor([training_image(rng) for _ in range(POOL)]).contiguous(memory_format=torch.channels_last)
    vae.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    steps = CROP_STEPS + WHOLE_STEPS
    schedule = Schedule(vae.named_parameters(), lr=2e-3, adam_lr=2e-3, steps=steps, decay=0.6)
    for step in range(steps):
        batch = _crops(pool, rng) if step < CROP_STEPS else pool[rng.sample(range(POOL), WHOLE_BATCH)]
        latents = vae.encode(batch).latent_dist.mode()
        noisy = latents + LATENT_NOISE * latents.std().detach() * torch.randn_like(latents)
        loss = reconstruction_loss(vae.decode(noisy).sample, batch)
        loss.backward()
        schedule.step()
        if step % 100 == 0:
            log.info("autoencoder step %d loss %.4f, %.0f s", step, loss.item(), time.monotonic() - started)
    vae.eval()
    _normalise(vae, pool[:512])
    report_quality(vae)


def _crops(pool: Tensor, rng: random.Random) -> Tensor:
    """Quarter pictures at places that are multiples of 4 px, where the latents' grid lies."""
    crops = []
    for index in rng.sample(range(len(pool)), CROP_BATCH):
        top, left = (4 * rng.randint(0, (pool.shape[-1] - CROP_PX) // 4) for _ in range(2))
        crops.append(pool[index, :, top : top + CROP_PX, left : left + CROP_PX])
    return torch.stack(crops).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def _normalise(vae: AutoencoderKL, images: Tensor) -> None:
    """Fold every channel's mean and spread into the convolutions next to the latents.

    The latents then have mean 0 and standard deviation 1 per channel, which one scaling_factor could not give. The
    unused log variance becomes a constant, so that sampling the posterior is harmless.
    """
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in images.split(64)])
    mean, spread = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    log.info("latent spread per channel before: %s", [round(float(value), 2) for value in spread])
    channels = vae.config["latent_channels"]
    before, after = vae.quant_conv, vae.post_quant_conv
    before.weight[:channels] /= spread.view(-1, 1, 1, 1)
    before.bias[:channels] = (before.bias[:channels] - mean) / spread
    before.weight[channels:] = 0
    before.bias[channels:] = -12
    after.bias += functional.conv2d(mean.view(1, -1, 1, 1), after.weight).flatten()
    after.weight *= spread.view(1, -1, 1, 1)


@torch.no_grad()
def report_quality(vae: AutoencoderKL, count: int = 48) -> dict[str, float]:
    """PSNR on pictures that training has not seen: plain ones and each style."""
    results = {}
    for name, style in {"plain": lambda picture: picture.rgb, **STYLES}.items():
        rng = random.Random(f"check {name}")
        images = to_tensor([style(render(draw_subject(rng), rng)) for _ in range(count)])
        results[name] = psnr(vae.decode(vae.encode(images).latent_dist.mode()).sample, images)
        log.info("autoencoder %s: %.1f dB", name, results[name])
    return results
