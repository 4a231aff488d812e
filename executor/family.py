"""What diffusers' pipelines have in common and where they differ, read off the pipeline itself.

Nothing here knows a pipeline by name: its components, the parameters of its call and its own properties say it all.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from executor.errors import UnsupportedModel
from executor.jobs import Parameters
from loraplex.errors import InvalidRequest
from loraplex.targets import DENOISERS

_NEEDED = ("prompt", "num_inference_steps", "generator", "callback_on_step_end", "output_type")
_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt")


@dataclass(frozen=True)
class Family:
    """One class of diffusers' pipelines, with the model that was loaded into it."""

    name: str
    pipeline: Any
    denoisers: tuple[str, ...]  # components; more than one where the steps are divided between models
    accepts: frozenset[str]  # the parameters of the pipeline's call
    per_prompt: str  # its parameter for the number of images or videos

    @property
    def makes_videos(self) -> bool:
        """Whether the results are frames."""
        return "num_frames" in self.accepts

    @property
    def heeds_guidance_scale(self) -> bool:
        """Whether guidance_scale changes anything: distilled models ignore it."""
        if "guidance_scale" not in self.accepts:
            return False
        if hasattr(type(self.pipeline), "do_classifier_free_guidance"):
            return any(self.pairs(scale) for scale in (0.5, 7.0))
        return bool(getattr(self.pipeline.components[self.denoisers[0]].config, "guidance_embeds", False))

    def pairs(self, guidance_scale: float) -> bool:
        """Whether every step computes a pair, with and without the prompt, at this guidance scale."""
        if not hasattr(type(self.pipeline), "do_classifier_free_guidance"):
            return False
        probe = copy.copy(self.pipeline)
        probe._guidance_scale = guidance_scale
        return bool(probe.do_classifier_free_guidance)

    @property
    def scale_without_pairs(self) -> float | None:
        """A guidance scale at which a step is one sample per image; None: any."""
        return next((scale for scale in (1.0, 0.0) if self.pairs(7.0) and not self.pairs(scale)), None)

    @property
    def multiple(self) -> int:
        """Width and height are multiples of this, in pixels."""
        processor = getattr(self.pipeline, "video_processor", None) or getattr(self.pipeline, "image_processor", None)
        factors = [getattr(processor, "config", {}).get("vae_scale_factor", 8)]
        patch = getattr(self.pipeline.components[self.denoisers[0]].config, "patch_size", 1)
        patch = patch[-1] if isinstance(patch, tuple | list) else patch
        for name in ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio"):
            factors.append(getattr(self.pipeline, name, 1) * (patch if isinstance(patch, int) else 1))
        return max(factors)

    @property
    def frames_multiple(self) -> int:
        """A video has 1 frame more than a multiple of this."""
        names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
        return next((getattr(self.pipeline, name) for name in names if hasattr(self.pipeline, name)), 1)

    def check_guidance(self, parameters: Parameters, default_guidance_scale: float) -> None:
        """Raise InvalidRequest for what the pipeline would silently ignore."""
        negative, scale = bool(parameters.negative_prompt), parameters.true_cfg_scale
        if negative and "negative_prompt" not in self.accepts:
            raise self._ignored("negative_prompt", "a negative prompt", "Leave it out.")
        if "true_cfg_scale" in self.accepts:
            if negative and scale <= 1:
                because = "a negative prompt unless true_cfg_scale is above 1"
                raise self._ignored("true_cfg_scale", because, "Set true_cfg_scale, for example to 4, or leave it out.")
            if scale > 1 and not negative:
                because = "true_cfg_scale without a negative prompt"
                raise self._ignored("negative_prompt", because, "Give a negative prompt, or leave true_cfg_scale out.")
        elif scale != 1:
            raise self._ignored("true_cfg_scale", "true_cfg_scale", "Leave it out.")
        elif negative and not self.pairs(parameters.guidance_scale):
            because = f"a negative prompt at guidance scale {parameters.guidance_scale:g}"
            raise self._ignored("guidance_scale", because, "Raise guidance_scale, or leave the negative prompt out.")
        if parameters.guidance_scale != default_guidance_scale and not self.heeds_guidance_scale:
            raise self._ignored("guidance_scale", "guidance_scale", "Leave it out.")

    def _ignored(self, field: str, what: str, remedy: str) -> InvalidRequest:
        return InvalidRequest(f"{self.name} ignores {what}.", field=field, remedy=remedy)


def family_of(pipeline: Any) -> Family:
    """The family of a pipeline; UnsupportedModel says what it lacks."""
    name, components = type(pipeline).__name__, pipeline.components
    denoisers = tuple(key for key in DENOISERS if isinstance(components.get(key), nn.Module))
    accepts = frozenset(inspect.signature(type(pipeline).__call__).parameters)
    per_prompt = next((one for one in _PER_PROMPT if one in accepts), "")
    lacks = [f"the parameter {one}" for one in _NEEDED if one not in accepts]
    lacks += [] if per_prompt else [f"a parameter {' or '.join(_PER_PROMPT)}"]
    lacks += [] if denoisers else ["a component transformer or unet"]
    lacks += [] if isinstance(components.get("vae"), nn.Module) else ["a component vae"]
    if lacks:
        raise UnsupportedModel(f"{name} is not served: it lacks {', '.join(lacks)}.")
    return Family(name, pipeline, denoisers, accepts, per_prompt)


def prompt_tokenizer(pipeline: Any, tokenizers: Mapping[str, Any], max_sequence_length: int) -> tuple[Any, int]:
    """The tokenizer whose encoder reads all of a prompt, and how many tokens that reads.

    Next to a larger encoder, CLIP only sums the prompt up and may cut it off at 77 tokens.
    """
    present = {name: one for name, one in sorted(tokenizers.items()) if one is not None}
    large = [one for one in present.values() if "CLIP" not in type(one).__name__]
    if "max_sequence_length" in inspect.signature(type(pipeline).__call__).parameters and large:
        return large[-1], max_sequence_length
    last = list(present.values())[-1]
    return last, last.model_max_length


def count_tokens(pipeline: Any, tokenizer: Any, text: str) -> int:
    """Tokens of a prompt as its encoder reads it, with what the pipeline writes around it."""
    if template := getattr(pipeline, "prompt_template_encode", None):
        skipped = getattr(pipeline, "prompt_template_encode_start_idx", 0)
        return len(tokenizer(template.format(text), truncation=False).input_ids) - skipped
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, truncation=False).input_ids)
