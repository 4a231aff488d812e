"""The optimizer: Muon for matrices and kernels, AdamW for everything else.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal matrix. For the few thousand
steps that one core allows, it gets further than AdamW alone.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 4


class Muon(torch.optim.Optimizer):
    """Steps of the size that AdamW would take with the same learning rate (RMS 0.2 per entry)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["momentum"])

    def _update(self, parameter: Tensor, grad: Tensor, lr: float, momentum: float) -> None:
        state = self.state[parameter]
        average = state.setdefault("average", torch.zeros_like(parameter))
        average.lerp_(grad, 1 - momentum)
        direction = grad.lerp(average, momentum).flatten(1)
        scale = 0.2 * max(direction.shape) ** 0.5
        parameter.add_(orthogonalised(direction).view_as(parameter), alpha=-lr * scale)


def orthogonalised(matrix: Tensor) -> Tensor:
    """`matrix` with all its singular values moved near 1, by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Schedule:
    """Two optimizers that step together: warm-up, constant rate, then linearly down to zero over `decay`."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, lr: float, adam_lr: float, steps: int, decay: float = 0.5
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named:
            (matrices if _is_for_muon(name, parameter) else others).append(parameter)
        self.parameters = matrices + others
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, adam_lr, (0.9, 0.98), weight_decay=0)
        ]
        if matrices:
            self._optimizers.append(Muon(matrices, lr))
        self._peaks = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        self._steps, self._decay, self._step = steps, decay, 0

    def step(self) -> None:
        """Clip the gradients, take one step and clear the gradients."""
        left = (self._steps - self._step) / (self._steps * self._decay)
        factor = min(1.0, (self._step + 1) / 50, max(left, 0.0))
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._step += 1


def _is_for_muon(name: str, parameter: nn.Parameter) -> bool:
    """Hidden matrices and kernels; embeddings, modulations, inputs and outputs are better off with AdamW."""
    outside = ("embed", "shared", "norm", "conv_in", "conv_out", "quant_conv", "relative_attention_bias")
    return parameter.ndim >= 2 and not name.startswith("proj_out") and not any(word in name for word in outside)
