"""The diffusers pipeline: load it, know its modes, copy it for a job, call it."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import nn

from executor.arguments import Batching
from executor.config import ExecutorSettings
from executor.errors import UnsupportedModel
from executor.family import count_tokens, family_of, prompt_tokenizer
from executor.fixed_shapes import fixed_shapes
from executor.jobs import Mode, Parameters
from executor.previews import LatentToRgb
from loraplex.errors import InvalidRequest
from loraplex.targets import adaptable_components

OnStep = Callable[[int], None]
OnPreview = Callable[[int, Sequence[Image.Image]], None]


class BasePipeline:
    """A loaded base model: the components that jobs share, and how its pipeline is called."""

    def __init__(
        self,
        pipeline: Any,
        max_sequence_length: int,
        *,
        default_guidance_scale: float = 3.5,
        num_frames: int = 1,
    ) -> None:
        """`max_sequence_length` is in tokens. Raises UnsupportedModel, saying what the pipeline lacks."""
        self.family = family_of(pipeline)
        self.family_name = self.family.name
        self.pipeline = pipeline
        self.max_sequence_length = max_sequence_length
        self.default_guidance_scale = default_guidance_scale
        self.num_frames = num_frames if self.family.makes_videos else 1
        self.components: dict[str, nn.Module] = {
            name: component for name, component in pipeline.components.items() if isinstance(component, nn.Module)
        }
        self.with_image = {} if self.family.makes_videos else _siblings(pipeline)
        self.frames_multiple = self.family.frames_multiple
        self.forwards: dict[str, Callable[..., Any]] = {}
        self.batching: dict[str, Batching] = {}  # of the denoisers; `executor.probe` finds out what has rows
        for name in self.family.denoisers:
            self.forwards[name], fix = fixed_shapes(self.components[name], max_sequence_length)
            self.batching[name] = Batching(frozenset(), fix=fix)
        self.latent_to_rgb: LatentToRgb | None = None
        self._spare_tokenizers: list[dict[str, Any]] = []

    @property
    def denoisers(self) -> dict[str, nn.Module]:
        """The transformer or UNet; two where the steps are divided between models."""
        return {name: self.components[name] for name in self.family.denoisers}

    @property
    def denoiser(self) -> nn.Module:
        """The first of the denoisers."""
        return self.components[self.family.denoisers[0]]

    @property
    def adaptable(self) -> dict[str, nn.Module]:
        """The components that adapters modify: the denoisers, then the text encoders of families that adapt them."""
        names = adaptable_components(self.family_name, self.components)
        return {name: self.components[name] for name in names}

    @property
    def modes(self) -> frozenset[Mode]:
        """What can be asked for."""
        return (
            frozenset({"text_to_video"}) if self.family.makes_videos else frozenset({"text_to_image", *self.with_image})
        )

    @property
    def has_previews(self) -> bool:
        """Whether a preview can be made of the latents."""
        return self.latent_to_rgb is not None

    @property
    def image_strengths(self) -> dict[Mode, float]:
        """The default of image_strength, by the modes that start from an image."""
        return {mode: _parameters(one)["strength"].default for mode, one in self.with_image.items()}

    def skipped_steps(self, num_inference_steps: int, image_strength: float) -> int:
        """How many of so many denoising steps an initial image saves."""
        sibling = next(iter(self.with_image.values()))
        # Its own rounding is asked: `get_timesteps` reads nothing of the pipeline but these.
        steps = SimpleNamespace(order=1, timesteps=range(num_inference_steps), set_begin_index=lambda index: None)
        left = sibling.get_timesteps(SimpleNamespace(scheduler=steps), num_inference_steps, image_strength, None)[1]
        return int(num_inference_steps - left)

    def check(self, parameters: Parameters) -> None:
        """Raise InvalidRequest for what this family would silently ignore, cut off, or need a new graph for."""
        for field in ("prompt", "negative_prompt"):
            self._check_length(field, getattr(parameters, field))
        self.family.check_guidance(parameters, self.default_guidance_scale)
        if parameters.num_frames != self.num_frames:
            raise InvalidRequest(
                f"This executor is warm for {self.num_frames} frames, not for {parameters.num_frames}.",
                field="num_frames",
                remedy=f"Use {self.num_frames}.",
            )

    def _check_length(self, field: str, text: str) -> None:
        with self._tokenizers() as tokenizers:
            tokenizer, most = prompt_tokenizer(self.pipeline, tokenizers, self.max_sequence_length)
            tokens = count_tokens(self.pipeline, tokenizer, text)
        if tokens > most:
            raise InvalidRequest(
                f"{field} is {tokens} tokens long; this executor reads {most}.",
                field=field,
                remedy="Shorten it, or use an executor with a larger max_sequence_length.",
            )

    def generate(self, parameters: Parameters, on_step: OnStep, on_preview: OnPreview) -> list[Image.Image]:
        """Run one pipeline call with its own noise scheduler. Image i starts from the noise of seed + i.

        A video is its frames in order. `on_preview` gets the images, or of videos a frame each, as they are.
        """

        def step_end(_pipeline: Any, step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            on_step(step + 1)
            if (
                self.latent_to_rgb
                and parameters.preview_every_steps
                and not (step + 1) % parameters.preview_every_steps
            ):
                size = parameters.width, parameters.height
                on_preview(step + 1, self.latent_to_rgb.images(kwargs["latents"], *size))
            return kwargs

        results = self._call(parameters, step_end)
        return [frame for video in results for frame in video] if self.family.makes_videos else results

    def fit_previews(self, width: int, height: int) -> None:
        """Find out what latents look like, from some images of this size; without a grid there are no previews."""
        last: list[torch.Tensor] = []

        def step_end(_pipeline: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            last[:] = [kwargs["latents"]]
            return kwargs

        # Enough cells for the fit: one large image, or several small ones.
        cells = (width // self.family.multiple) * (height // self.family.multiple)
        number = max(1, min(16, 2048 // cells))
        results = self._call(self.example(width, height, num_images=number), step_end)
        firsts = [video[0] for video in results] if self.family.makes_videos else results
        try:
            self.latent_to_rgb = LatentToRgb.fit(last[0], firsts, self.family.multiple)
        except ValueError:
            self.latent_to_rgb = None

    def example(self, width: int, height: int, *, num_images: int, prompt: str = "warm-up") -> Parameters:
        """The parameters of a short job whose steps are one sample per image."""
        scale = self.family.scale_without_pairs
        return Parameters(
            prompt=prompt,
            negative_prompt="",
            adapters=(),
            seed=0,
            width=width,
            height=height,
            # Where the steps are divided between models, enough of them that each gets its part.
            num_inference_steps=2 if len(self.family.denoisers) == 1 else 8,
            guidance_scale=self.default_guidance_scale if scale is None else scale,
            true_cfg_scale=1.0,
            num_images=num_images,
            image_format="PNG",
            num_frames=self.num_frames,
        )

    def _call(self, parameters: Parameters, step_end: Callable[..., Any]) -> Any:
        seeds = range(parameters.seed, parameters.seed + parameters.num_images)
        with self._tokenizers() as tokenizers:
            pipeline = self._copy(tokenizers, parameters)
            accepts = _parameters(type(pipeline))
            maybe: dict[str, Any] = {
                "width": parameters.width,
                "height": parameters.height,
                "num_frames": parameters.num_frames,
                "max_sequence_length": self.max_sequence_length,
            }
            if self.family.heeds_guidance_scale:
                maybe["guidance_scale"] = parameters.guidance_scale
            if parameters.negative_prompt:
                maybe |= {"negative_prompt": parameters.negative_prompt, "true_cfg_scale": parameters.true_cfg_scale}
            return pipeline(
                prompt=parameters.prompt,
                num_inference_steps=parameters.num_inference_steps,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                callback_on_step_end=step_end,
                output_type="pil",
                **{self.family.per_prompt: parameters.num_images},
                **{name: value for name, value in maybe.items() if name in accepts},
                **_images(parameters),
            )[0]

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
        pipeline_class = self.with_image[kind] if parameters.initial_image else type(self.pipeline)
        wanted = inspect.signature(pipeline_class.__init__).parameters
        # What is no component, as `boundary_ratio` or `is_distilled`, stands in the pipeline's configuration.
        options = {name: value for name, value in self.pipeline.config.items() if name in wanted and name not in own}
        pipeline = pipeline_class(**{name: part for name, part in own.items() if name in wanted}, **options)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def _parameters(pipeline_class: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(pipeline_class.__call__).parameters


def _siblings(pipeline: Any) -> dict[Mode, Any]:
    """diffusers' pipelines for the same components that start from an image, where there are any.

    They are told by their names; diffusers' own table of them imports every pipeline that there is.
    """
    found: dict[Mode, Any] = {}
    kinds: dict[Mode, tuple[str, set[str]]] = {
        "image_to_image": ("Img2ImgPipeline", {"image", "strength"}),
        "inpaint": ("InpaintPipeline", {"image", "strength", "mask_image"}),
    }
    for mode, (ending, needed) in kinds.items():
        sibling = getattr(diffusers, type(pipeline).__name__.removesuffix("Pipeline") + ending, None)
        if sibling and needed <= set(_parameters(sibling)) and hasattr(sibling, "get_timesteps"):
            found[mode] = sibling
    return found


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
    base = BasePipeline(
        pipeline.to(device),
        settings.max_sequence_length,
        default_guidance_scale=settings.default_guidance_scale,
        num_frames=settings.default_num_frames,
    )
    _check_sizes(base, settings)
    for component in base.components.values():
        component.eval().requires_grad_(False)
    return base


def _check_sizes(base: BasePipeline, settings: ExecutorSettings) -> None:
    multiple = base.family.multiple
    for width, height in settings.resolutions:
        if width % multiple or height % multiple:
            raise UnsupportedModel(f"{base.family_name} makes multiples of {multiple} pixels, not {width}x{height}.")
    if (base.num_frames - 1) % base.frames_multiple:
        raise UnsupportedModel(
            f"{base.family_name} makes 1 frame more than a multiple of {base.frames_multiple}; "
            f"default_num_frames is {base.num_frames}."
        )
