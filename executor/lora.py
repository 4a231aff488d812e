"""Layers that add the active rank rows to a base layer, and attaching them to a model.

With A and B views of the arena and (row_index, row_strength) the row table, every sample i of a batch gets

    y_i = base(x_i) + (x_i @ A[row_index_i].T) @ (row_strength_i * B[row_index_i])

which is the LoRA branch of Hu et al. (2021), with alpha / rank folded into B beforehand.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from executor.arena import Arena, RowTable


class _LoraLayer(nn.Module):
    """A base layer and its part of the arena. A, B and the row table are plain attributes: `.to()` leaves them."""

    base: Any  # nn.Linear or nn.Conv2d; nn.Module's attributes have no narrower type

    def __init__(
        self, base: nn.Module, A: torch.Tensor, B: torch.Tensor, table: RowTable, *, folded: bool = False
    ) -> None:
        """`folded`: the first dimension of x is samples x something, sample by sample, as with frames."""
        super().__init__()
        self.base = base
        self.lora_A = A  # [num_rows, in * kernel]
        self.lora_B = B  # [num_rows, out]
        self.row_index = table.row_index  # [max_batch, R]
        self.row_strength = table.row_strength  # [max_batch, R]
        self._table = table if folded else None

    def samples(self, x: torch.Tensor) -> int:
        """How many samples x holds."""
        return self._table.batch if self._table else x.shape[0]

    def active(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [batch, R, in * kernel] and B [batch, R, out] of the rows that each sample uses, strength in B.

        Scaling B, and not the product with A, saves a kernel per layer: it is fused with the gather.
        """
        rows = self.row_index[:batch]
        strength = self.row_strength[:batch, :, None]
        B = self.lora_B[rows]
        return self.lora_A[rows], (B * strength).to(B.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The base layer's weight; models read its dtype."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The base layer's bias."""
        return self.base.bias


class LoraLinear(_LoraLayer):
    """A linear layer with rank rows. The first dimension of x is the batch."""

    @property
    def in_features(self) -> int:
        """The base layer's width; some pipelines ask for it."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """The base layer's width of the output."""
        return self.base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, ..., in] to [batch, ..., out]."""
        batch = self.samples(x)
        A, B = self.active(batch)  # [batch, R, in], [batch, R, out]
        tokens = x.reshape(batch, -1, x.shape[-1]).to(A.dtype)  # [batch, tokens, in]
        hidden = torch.bmm(tokens, A.transpose(1, 2))  # [batch, tokens, R]
        y = self.base(x)
        return y + torch.bmm(hidden, B).reshape(y.shape).to(y.dtype)


class LoraConv2d(_LoraLayer):
    """A convolution (groups = 1, zero padding) with rank rows: A has its kernel, B is 1 x 1."""

    @property
    def in_channels(self) -> int:
        """The base layer's channels."""
        return self.base.in_channels

    @property
    def out_channels(self) -> int:
        """The base layer's channels of the output."""
        return self.base.out_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, in, height, width] to [batch, out, height', width']."""
        batch, channels = x.shape[:2]
        samples = self.samples(x)
        A, B = self.active(samples)  # [samples, R, in * kernel], [samples, R, out]
        if samples != batch:
            A, B = A.repeat_interleave(batch // samples, 0), B.repeat_interleave(batch // samples, 0)
        base = self.base
        hidden = functional.conv2d(  # one group per sample: [1, batch * R, height', width']
            x.reshape(1, batch * channels, *x.shape[2:]).to(A.dtype),
            A.reshape(-1, channels, *base.kernel_size),
            stride=base.stride,
            padding=base.padding,
            dilation=base.dilation,
            groups=batch,
        )
        hidden = hidden.reshape(batch, A.shape[1], -1)  # [batch, R, pixels]
        y = base(x)
        return y + torch.bmm(B.transpose(1, 2), hidden).reshape(y.shape).to(y.dtype)


def attach(components: Mapping[str, nn.Module], arena: Arena, table: RowTable, folded: Collection[str] = ()) -> None:
    """Put a LoraLinear or LoraConv2d in place of every module of the arena's layout. The base weights stay the same.

    `folded` are the paths of those whose input has several rows per sample. Raises ValueError when rows are attached
    already.
    """
    for index, target in enumerate(arena.layout.modules):
        model = components[target.component]
        module = model.get_submodule(target.name)
        if isinstance(module, _LoraLayer):
            raise ValueError(f"{target.path} has rank rows already")
        layer = LoraLinear if isinstance(module, nn.Linear) else LoraConv2d
        A, B = arena.views(index)
        parent, _, child = target.name.rpartition(".")
        new = layer(module, A, B, table, folded=target.path in folded)
        model.get_submodule(parent).register_module(child, new)
