"""What the executor must agree with: diffusers and PEFT, loaded fresh and eager, without any code of the executor."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image

from executor.jobs import Parameters
from executor.store_client import PackedAdapter
from loraplex.layout import Layout


def peft_state(layout: Layout, adapter: PackedAdapter) -> dict[str, torch.Tensor]:
    """The rows of a packed adapter as diffusers loads them: alpha is the rank, so the scaling is 1."""
    state: dict[str, torch.Tensor] = {}
    start, rank = 0, adapter.header.rank
    for index in adapter.header.module_indexes:
        module = layout.modules[index]
        A = adapter.rows[:, start : start + module.a_width]
        B = adapter.rows[:, start + module.a_width : start + module.width].T
        if module.kind == "conv2d":
            A = A.reshape(rank, module.in_features, *module.kernel)
            B = B.reshape(module.out_features, rank, 1, 1)
        state[f"{module.path}.lora_A.weight"] = A.contiguous()
        state[f"{module.path}.lora_B.weight"] = B.contiguous()
        start += module.width
    return state


class Reference:
    """A fresh pipeline with adapters at their strengths; it records what its denoisers give."""

    def __init__(self, folder: Path, layout: Layout, adapters: Sequence[tuple[PackedAdapter, float]] = ()) -> None:
        self.pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
        for position, (adapter, _) in enumerate(adapters):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT warns of every second adapter
                self._load(peft_state(layout, adapter), f"a{position}")
        if adapters:
            names = [f"a{position}" for position in range(len(adapters))]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.pipeline.set_adapters(names, [strength for _, strength in adapters])
        self.outputs: list[torch.Tensor] = []
        for name in ("transformer", "transformer_2", "unet"):
            if denoiser := self.pipeline.components.get(name):
                denoiser.register_forward_hook(lambda *call: self.outputs.append(_plain(call[-1][0])))

    def _load(self, state: Mapping[str, torch.Tensor], name: str) -> None:
        second = {key.removeprefix("transformer_2."): A for key, A in state.items() if key.startswith("transformer_2.")}
        first = {key: A for key, A in state.items() if not key.startswith("transformer_2.")}
        if first:
            self.pipeline.load_lora_weights(first, adapter_name=name)
        if second:
            second = {f"transformer.{key}": A for key, A in second.items()}
            self.pipeline.load_lora_weights(second, adapter_name=name, load_into_transformer_2=True)

    def generate(self, parameters: Parameters, max_sequence_length: int) -> list[Image.Image]:
        """The images, or the frames of the videos; `outputs` gets what the denoisers gave."""
        self.outputs.clear()
        pipeline = self._pipeline(parameters)
        pipeline.set_progress_bar_config(disable=True)
        seeds = range(parameters.seed, parameters.seed + parameters.num_images)
        options: dict[str, Any] = {
            "width": parameters.width,
            "height": parameters.height,
            "num_frames": parameters.num_frames,
            "guidance_scale": parameters.guidance_scale,
            "max_sequence_length": max_sequence_length,
            "num_images_per_prompt": parameters.num_images,
            "num_videos_per_prompt": parameters.num_images,
        }
        if parameters.negative_prompt:
            options["negative_prompt"] = parameters.negative_prompt
            options["true_cfg_scale"] = parameters.true_cfg_scale
        if parameters.initial_image:
            options["image"] = [parameters.initial_image] * parameters.num_images
            options["strength"] = parameters.image_strength
        if parameters.mask_image:
            options["mask_image"] = parameters.mask_image
        accepts = inspect.signature(type(pipeline).__call__).parameters
        results = pipeline(
            prompt=parameters.prompt,
            num_inference_steps=parameters.num_inference_steps,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="pil",
            **{name: value for name, value in options.items() if name in accepts},
        )[0]
        return [frame for video in results for frame in video] if isinstance(results[0], list) else results

    def _pipeline(self, parameters: Parameters) -> Any:
        if not parameters.initial_image:
            return self.pipeline
        ending = "InpaintPipeline" if parameters.mask_image else "Img2ImgPipeline"
        sibling = getattr(diffusers, type(self.pipeline).__name__.removesuffix("Pipeline") + ending)
        return sibling.from_pipe(self.pipeline)


def _plain(output: Any) -> torch.Tensor:
    return torch.stack(list(output)) if isinstance(output, list) else output


def largest_relative_error(ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """|ours - reference| / |reference| over the calls of a whole generation, in fp64."""
    assert len(ours) == len(reference)
    pairs = zip(ours, reference, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)
