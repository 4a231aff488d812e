"""Denoisers whose arguments change shape with the prompt, made to take arguments of fixed shapes.

Where the model has a mask for the text, padding to the longest prompt is exact. Z-Image builds its sequences of lists
of tensors, so its forward is written anew here, over the model's own layers, for a batch of padded captions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from executor.arguments import Arguments

_GRANULE = 32  # Z-Image fills captions and images up with learned tokens to a multiple of this

Fix = Callable[[Arguments], Arguments]


def fixed_shapes(denoiser: nn.Module, max_sequence_length: int) -> tuple[Callable[..., Any], Fix | None]:
    """The forward to run, and what makes the arguments of a pipeline's call fit it (None: they do as they are).

    Classes are told by name, for which diffusers need not be imported.
    """
    name = type(denoiser).__name__
    if name == "QwenImageTransformer2DModel":
        return denoiser.forward, lambda arguments: _fix_qwen(arguments, max_sequence_length)
    if name == "ZImageTransformer2DModel":

        def forward(x: Any, t: Any, cap_feats: Any, cap_lens: Any, **more: Any) -> tuple[torch.Tensor]:
            return (z_image_forward(denoiser, x, t, cap_feats, cap_lens, **more),)

        return forward, lambda arguments: _fix_z_image(arguments, _filled_up(max_sequence_length))
    return denoiser.forward, None


def _fix_qwen(arguments: Arguments, length: int) -> Arguments:
    text, mask = arguments["encoder_hidden_states"], arguments.get("encoder_hidden_states_mask")
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    missing = length - text.shape[1]
    return {
        **arguments,
        "encoder_hidden_states": functional.pad(text, (0, 0, 0, missing)),
        "encoder_hidden_states_mask": functional.pad(mask.bool(), (0, missing)),
        "img_shapes": arguments["img_shapes"][:1],  # one per sample, all the same: the model reads the first
    }


def _fix_z_image(arguments: Arguments, length: int) -> Arguments:
    captions = arguments["cap_feats"]
    return {
        **arguments,
        "x": torch.stack(list(arguments["x"])),
        "cap_feats": torch.stack([functional.pad(one, (0, 0, 0, length - len(one))) for one in captions]),
        "cap_lens": torch.tensor([len(one) for one in captions], device=captions[0].device),
    }


def z_image_forward(
    model: Any,
    x: torch.Tensor,
    t: torch.Tensor,
    cap_feats: torch.Tensor,
    cap_lens: torch.Tensor,
    patch_size: int = 2,
    f_patch_size: int = 1,
    **_: Any,
) -> torch.Tensor:
    """ZImageTransformer2DModel.forward for x [batch, channels, frames, height, width] and padded captions.

    `cap_feats` is [batch, length, features] with `length` a multiple of 32; `cap_lens` [batch] says how many of them
    are real. As in diffusers, a caption is filled up to a multiple of 32 with the model's token for that; what lies
    behind is masked. So the result is that of diffusers, up to rounding.
    """
    kind = f"{patch_size}-{f_patch_size}"
    time = model.t_embedder(t * model.t_scale).type_as(x)
    patches, grid = _patches(x, patch_size, f_patch_size)
    filled = (cap_lens + _GRANULE - 1) // _GRANULE * _GRANULE  # [batch]

    image = _with_padding(model.all_x_embedder[kind](patches), model.x_pad_token)
    image_freqs = _image_freqs(model, grid, filled, image.shape[1])
    for layer in model.noise_refiner:
        image = layer(image, None, image_freqs, time)

    position = torch.arange(cap_feats.shape[1], device=x.device)
    caption = model.cap_embedder(cap_feats)
    caption = torch.where((position < cap_lens[:, None])[..., None], caption, model.cap_pad_token.to(caption.dtype))
    caption_mask = position < filled[:, None]  # [batch, length]
    caption_freqs = _freqs(model, position[None] + 1, torch.zeros_like(position), torch.zeros_like(position))
    caption_freqs = caption_freqs.expand(len(x), -1, -1)
    for layer in model.context_refiner:
        caption = layer(caption, caption_mask, caption_freqs)

    both = torch.cat([image, caption], dim=1)
    mask = functional.pad(caption_mask, (image.shape[1], 0), value=True)
    freqs = torch.cat([image_freqs, caption_freqs], dim=1)
    for layer in model.layers:
        both = layer(both, mask, freqs, time)
    both = model.all_final_layer[kind](both, c=time)
    return _unpatched(both[:, : patches.shape[1]], grid, patch_size, f_patch_size)


def _patches(x: torch.Tensor, side: int, depth: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """[batch, tokens, patch], and how many tokens there are along frames, height and width."""
    batch, channels, frames, height, width = x.shape
    grid = (frames // depth, height // side, width // side)
    x = x.view(batch, channels, grid[0], depth, grid[1], side, grid[2], side)
    return x.permute(0, 2, 4, 6, 3, 5, 7, 1).reshape(batch, grid[0] * grid[1] * grid[2], -1), grid


def _unpatched(tokens: torch.Tensor, grid: tuple[int, int, int], side: int, depth: int) -> torch.Tensor:
    batch, frames, height, width = len(tokens), *grid
    x = tokens.reshape(batch, frames, height, width, depth, side, side, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return x.reshape(batch, -1, frames * depth, height * side, width * side)


def _with_padding(tokens: torch.Tensor, pad_token: torch.Tensor) -> torch.Tensor:
    missing = -tokens.shape[1] % _GRANULE
    return torch.cat([tokens, pad_token.to(tokens.dtype).expand(len(tokens), missing, -1)], dim=1)


def _image_freqs(model: Any, grid: tuple[int, int, int], filled: torch.Tensor, length: int) -> torch.Tensor:
    """Images start on the first axis where their captions end; padding stands at the origin."""
    axes = torch.meshgrid(*(torch.arange(size, device=filled.device) for size in grid), indexing="ij")
    frame, row, column = (functional.pad(axis.flatten(), (0, length - axis.numel())) for axis in axes)
    real = torch.arange(length, device=filled.device) < axes[0].numel()
    return _freqs(model, torch.where(real, frame + filled[:, None] + 1, 0), row, column)


def _freqs(model: Any, *axes: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, head / 2], complex, of positions [batch, tokens] or [tokens] on three axes."""
    ids = torch.stack(torch.broadcast_tensors(*axes), dim=-1)
    return model.rope_embedder(ids.reshape(-1, 3)).reshape(*ids.shape[:-1], -1)


def _filled_up(length: int) -> int:
    return -(-length // _GRANULE) * _GRANULE
