"""A pipeline that is none of diffusers', to show what is asked of one, and denoisers with their peculiarities."""

from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import nn

WIDTH = 8


class Scheduler:
    config = SimpleNamespace()

    @classmethod
    def from_config(cls, config: Any) -> "Scheduler":
        return cls()


class Denoiser(nn.Module):
    """Each sample for itself."""

    config = SimpleNamespace()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.requires_grad_(False)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, return_dict: bool = True) -> Any:
        time = self.time(timestep.float().expand(len(hidden_states))[:, None])
        return (self.mix(hidden_states) + time[:, None],)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


class MixesSamples(Denoiser):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x - x.mean(0))


class FoldsTokens(Denoiser):
    """Its layer sees samples x tokens, as temporal layers see samples x frames."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class TurnsTokens(Denoiser):
    """Its layer sees tokens x samples, so that the rows of a sample do not stand together."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


class NeedsOneTime(Denoiser):
    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, return_dict: bool = True) -> Any:
        return super().forward(hidden_states, torch.tensor(float(timestep)))


class PlainPipeline:
    """Three tokens per image; `prompt_shapes` makes the arguments depend on the prompt's length."""

    prompt_shapes = False

    def __init__(self, transformer: nn.Module, vae: nn.Module, scheduler: Any) -> None:
        self.components = {"transformer": transformer, "vae": vae, "scheduler": scheduler}
        self.config: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["components"][name]
        except KeyError:
            raise AttributeError(name) from None

    def set_progress_bar_config(self, disable: bool) -> None:
        pass

    def __call__(
        self,
        prompt: str,
        num_inference_steps: int,
        generator: list[torch.Generator],
        callback_on_step_end: Any,
        output_type: str,
        num_images_per_prompt: int,
        width: int,
        height: int,
    ) -> Any:
        tokens = len(prompt) if self.prompt_shapes else 3
        latents = torch.stack([torch.randn(tokens, WIDTH, generator=one) for one in generator])
        for step in range(num_inference_steps):
            latents = latents - self.transformer(latents, torch.tensor(900 - step)).sample / 10
            callback_on_step_end(self, step, None, {"latents": latents})
        return ([Image.new("RGB", (width, height))] * num_images_per_prompt,)


class PromptShapes(PlainPipeline):
    prompt_shapes = True


def plain(denoiser: nn.Module, kind: type[PlainPipeline] = PlainPipeline) -> PlainPipeline:
    """A pipeline around this denoiser."""
    return kind(denoiser, nn.Identity(), Scheduler())
