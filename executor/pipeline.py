"""The diffusers pipeline: load it, know its family, copy it for a job, call it."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from diffusers import DiffusionPipeline, FluxImg2ImgPipeline, FluxInpaintPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import nn

from executor.config import ExecutorSettings
from executor.errors import UnsupportedModel
from executor.images import MAX_PREVIEW_SIDE
from executor.jobs import Mode, Parameters
from loraplex.errors import InvalidRequest
from loraplex.targets import adaptable_components


@dataclass(frozen=True)
class Family:
    """What differs between the pipelines of diffusers."""

    denoiser: str
    batched: frozenset[str]  # arguments of the denoiser whose first dimension is the batch
    true_cfg: bool  # a negative prompt needs true_cfg_scale above 1
    tokenizer: str  # the one that sees all of a prompt, up to max_sequence_length
    with_image: Mapping[Mode, Any]  # diffusers' pipelines that start from an image


FAMILIES = {
    "FluxPipeline": Family(
        denoiser="transformer",
        batched=frozenset({"hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance"}),
        true_cfg=True,
        tokenizer="tokenizer_2",
        with_image={"image_to_image": FluxImg2ImgPipeline, "inpaint": FluxInpaintPipeline},
    ),
}


class BasePipeline:
    """A loaded base model: the components that jobs share, and how its pipeline is called."""

    def __init__(self, pipeline: Any, max_sequence_length: int) -> None:
        """`max_sequence_length` is in tokens. Raises UnsupportedModel when the pipeline's class is not known here."""
        self.family_name = type(pipeline).__name__
        if self.family_name not in FAMILIES:
            raise UnsupportedModel(f"{self.family_name} is not served; known are {', '.join(FAMILIES)}.")
        self.family = FAMILIES[self.family_name]
        self.pipeline = pipeline
        self.max_sequence_length = max_sequence_length
        self.components: dict[str, nn.Module] = {
            name: component for name, component in pipeline.components.items() if isinstance(component, nn.Module)
        }
        self.modes: frozenset[Mode] = frozenset({"text_to_image", *self.family.with_image})
        self.has_previews = True
        self.frames_multiple = 1
        self._spare_tokenizers: list[dict[str, Any]] = []

    @property
    def denoiser(self) -> nn.Module:
        """The transformer or UNet."""
        return self.components[self.family.denoiser]

    @property
    def adaptable(self) -> dict[str, nn.Module]:
        """The components that adapters modify: the denoiser, then the text encoders."""
        names = adaptable_components(self.family_name, self.components)
        return {name: self.components[name] for name in names}

    @property
    def image_strengths(self) -> dict[Mode, float]:
        """The default of image_strength, by the modes that start from an image."""
        return {
            mode: inspect.signature(pipeline.__call__).parameters["strength"].default
            for mode, pipeline in self.family.with_image.items()
        }

    def skipped_steps(self, num_inference_steps: int, image_strength: float) -> int:
        """How many of so many denoising steps an initial image saves."""
        return int(max(num_inference_steps - min(num_inference_steps * image_strength, num_inference_steps), 0))

    def check(self, parameters: Parameters) -> None:
        """Raise InvalidRequest for what this family would silently ignore or cut off."""
        for field in ("prompt", "negative_prompt"):
            self._check_length(field, getattr(parameters, field))
        if self.family.true_cfg and parameters.negative_prompt and parameters.true_cfg_scale <= 1:
            raise InvalidRequest(
                f"{self.family_name} ignores a negative prompt unless true_cfg_scale is above 1.",
                field="true_cfg_scale",
                remedy="Set true_cfg_scale, for example to 4, or leave the negative prompt out.",
            )
        if self.family.true_cfg and parameters.true_cfg_scale > 1 and not parameters.negative_prompt:
            raise InvalidRequest(
                f"{self.family_name} ignores true_cfg_scale without a negative prompt.",
                field="negative_prompt",
                remedy="Give a negative prompt, or leave true_cfg_scale out.",
            )

    def _check_length(self, field: str, text: str) -> None:
        with self._tokenizers() as tokenizers:
            tokens = len(tokenizers[self.family.tokenizer](text, truncation=False).input_ids)
        if tokens > self.max_sequence_length:
            raise InvalidRequest(
                f"{field} is {tokens} tokens long; this executor reads {self.max_sequence_length}.",
                field=field,
                remedy="Shorten it, or use an executor with a larger max_sequence_length.",
            )

    def generate(
        self,
        parameters: Parameters,
        on_step: Callable[[int], None],
        on_preview: Callable[[int, Sequence[Image.Image]], None],
    ) -> list[Image.Image]:
        """Run one pipeline call with its own noise scheduler. Image i starts from the noise of seed + i.

        A video is its frames in order. `on_preview` gets the images, or of videos a frame each, as they are.
        """

        def step_end(pipeline: Any, step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            on_step(step + 1)
            if parameters.preview_every_steps and (step + 1) % parameters.preview_every_steps == 0:
                on_preview(step + 1, self._preview(pipeline, kwargs["latents"], parameters))
            return kwargs

        guidance: dict[str, Any] = {}
        if parameters.negative_prompt:
            guidance = {
                "negative_prompt": parameters.negative_prompt,
                "true_cfg_scale": parameters.true_cfg_scale,
            }
        seeds = range(parameters.seed, parameters.seed + parameters.num_images)
        with self._tokenizers() as tokenizers:
            return self._copy(tokenizers, parameters)(
                prompt=parameters.prompt,
                width=parameters.width,
                height=parameters.height,
                num_inference_steps=parameters.num_inference_steps,
                guidance_scale=parameters.guidance_scale,
                num_images_per_prompt=parameters.num_images,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                max_sequence_length=self.max_sequence_length,
                callback_on_step_end=step_end,
                **guidance,
                **_images(parameters),
            ).images

    def _preview(self, pipeline: Any, latents: torch.Tensor, parameters: Parameters) -> list[Image.Image]:
        unpacked = pipeline._unpack_latents(latents, parameters.height, parameters.width, pipeline.vae_scale_factor)
        # Latents of a smaller picture: the autoencoder's cost goes with the area, and a preview must not cost a step.
        smaller = max(1, max(parameters.width, parameters.height) // MAX_PREVIEW_SIDE)
        unpacked = torch.nn.functional.avg_pool2d(unpacked, smaller) if smaller > 1 else unpacked
        scaled = unpacked / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor
        return pipeline.image_processor.postprocess(pipeline.vae.decode(scaled, return_dict=False)[0])

    @contextmanager
    def _tokenizers(self) -> Iterator[dict[str, Any]]:
        # A tokenizer keeps the padding and truncation of a call as state, so jobs that run together cannot share one.
        try:
            own = self._spare_tokenizers.pop()
        except IndexError:
            components = self.pipeline.components.items()
            own = {name: copy.deepcopy(component) for name, component in components if name.startswith("tokenizer")}
        try:
            yield own
        finally:
            self._spare_tokenizers.append(own)

    def _copy(self, tokenizers: dict[str, Any], parameters: Parameters) -> Any:
        scheduler = self.pipeline.scheduler
        own = {**self.pipeline.components, **tokenizers, "scheduler": type(scheduler).from_config(scheduler.config)}
        kind: Mode = "inpaint" if parameters.mask_image else "image_to_image"
        pipeline = (self.family.with_image[kind] if parameters.initial_image else type(self.pipeline))(**own)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def _images(parameters: Parameters) -> dict[str, Any]:
    if parameters.initial_image is None:
        return {}
    # As often as there are images: each is encoded with its own generator, so that it depends on its own seed alone.
    images = {"image": [parameters.initial_image] * parameters.num_images, "strength": parameters.image_strength}
    return images | ({"mask_image": parameters.mask_image} if parameters.mask_image else {})


def load(settings: ExecutorSettings, device: torch.device, dtype: torch.dtype) -> BasePipeline:
    """Load the base model onto `device`, ready for inference. Safetensors only: a pickle is never read."""
    diffusers_logging.disable_progress_bar()
    diffusers_logging.set_verbosity_error()  # its warning about a long prompt quotes the prompt
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # it warns of image processors that no text-to-image pipeline uses
    pipeline = DiffusionPipeline.from_pretrained(settings.base_model, dtype=dtype, use_safetensors=True)
    base = BasePipeline(pipeline.to(device), settings.max_sequence_length)
    for component in base.components.values():
        component.eval().requires_grad_(False)
    return base


def compiled_denoiser(base: BasePipeline, mode: str) -> Callable[..., Any]:
    """The denoiser's forward with torch.compile on all of it ("whole"), on each repeated block ("regional"), or "off".

    Shapes are static and graph breaks are errors.
    """
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 256  # one graph per kind of block, batch size and resolution
    denoiser: Any = base.denoiser
    if mode == "whole":
        return torch.compile(denoiser.forward, fullgraph=True, dynamic=False)
    if mode == "regional":
        if not getattr(denoiser, "_repeated_blocks", None):
            raise UnsupportedModel(f"{type(denoiser).__name__} names no repeated blocks; set compile to whole or off.")
        denoiser.compile_repeated_blocks(fullgraph=True, dynamic=False)
    return denoiser.forward


def compiled_graphs() -> int:
    """How many graphs dynamo has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
