"""The executor's settings: one frozen object, read once from flags and LORAPLEX_EXECUTOR_* variables."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from loraplex.channel import MAX_IMAGE_BYTES
from loraplex.serving import ServingSettings

Quantization = Literal["none", "fp8", "int8", "fp8_weights", "int8_weights"]
Resolution = tuple[int, int]  # width and height in pixels


def parse_resolution(text: str) -> Resolution:
    """A resolution out of WIDTHxHEIGHT. Raises ValueError unless both are positive multiples of 8."""
    width, separator, height = text.strip().lower().partition("x")
    if not (separator and width.isdigit() and height.isdigit()):
        raise ValueError(f"a resolution is WIDTHxHEIGHT, got {text!r}")
    resolution = int(width), int(height)
    if min(resolution) < 8 or any(side % 8 for side in resolution):
        raise ValueError(f"width and height must be positive multiples of 8, got {text!r}")
    return resolution


class ExecutorSettings(ServingSettings):
    """Settings of one executor."""

    model_config = SettingsConfigDict(env_prefix="LORAPLEX_EXECUTOR_", frozen=True)

    listen: str = "127.0.0.1:50061"
    """Host:port of the gRPC server."""
    metrics_listen: str = "127.0.0.1:9461"
    """Host:port of the Prometheus metrics."""
    base_model: str
    """Folder or hub id of a diffusers pipeline."""
    base_model_name: str = ""
    """What the base model is called; base_model when empty."""
    store: str = "127.0.0.1:50051"
    """Host:port of the adapter store."""
    store_wait_s: float = Field(120.0, gt=0, allow_inf_nan=False)
    """How long to wait for the adapter store at start."""
    fetch_timeout_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    """Longest time for one fetch from the adapter store."""
    device: str = "auto"
    """Auto, cpu, cuda or cuda:N; auto takes cuda when there is one."""
    dtype: Literal["auto", "F32", "BF16", "F16"] = "auto"
    """Auto is F32 on cpu, BF16 on cuda."""
    threads: int = Field(0, ge=0)
    """CPU threads of one operation; 0 leaves torch's choice."""
    compile: Literal["regional", "whole", "off"] = "regional"
    """What torch.compile gets: each repeated block, the whole denoiser, or nothing."""
    quantization: Quantization = "none"
    """Linear layers of the denoiser: fp8 and int8 compute in it, fp8_weights and int8_weights store it. Needs torchao;
    fp8 an NVIDIA GPU of capability 8.9."""
    text_encoder_quantization: Literal["none", "fp8_weights", "int8_weights"] = "none"
    """The same for the text encoders, to save memory."""
    attention_backend: str = ""
    """The denoiser's attention by diffusers' name for it: native, _flash_3, flash, sage; empty leaves its choice."""
    vae_tiling: bool = False
    """Decode large images in tiles, to save memory."""
    compile_cache_dir: Path | None = Path("~/.cache/loraplex/executor")
    """Folder of compiled artefacts, for quick starts; an empty value leaves it to torch."""
    batch_sizes: Annotated[tuple[int, ...], NoDecode] = (1, 2)
    """Batch sizes of the denoiser, compiled at warm-up; must contain 1."""
    resolutions: Annotated[tuple[Resolution, ...], NoDecode] = ((1024, 1024),)
    """WIDTHxHEIGHT, separated by commas; the first is the default."""
    arena_rows: int = Field(256, ge=2)
    """Rank rows on the device, shared by all resident adapters."""
    arena_bytes: int = Field(0, ge=0)
    """Memory for rank rows, instead of their number."""
    arena_share: float = Field(0.0, ge=0, lt=1, allow_inf_nan=False)
    """Part of the GPU memory that the model leaves free, for rank rows; leave the rest to activations."""
    rows_per_sample: int = Field(64, ge=1)
    """Rank rows that one image can select: the sum of its ranks."""
    host_cache_bytes: int = Field(4 << 30, ge=0)
    """Host memory for packed adapters."""
    max_queue_length: int = Field(64, ge=1)
    """Unfinished requests before QUEUE_FULL."""
    max_running_jobs: int = Field(4, ge=1)
    """Requests whose pipelines run at the same time."""
    batch_wait_ms: float = Field(5.0, ge=0, allow_inf_nan=False)
    """How long a denoiser call waits for others to share a batch."""
    default_num_inference_steps: int = Field(28, ge=1)
    """Steps of a request that names none."""
    max_num_inference_steps: int = Field(100, ge=1)
    """Most steps of a request."""
    default_guidance_scale: float = Field(3.5, ge=0, allow_inf_nan=False)
    """Guidance scale of a request that names none."""
    max_num_images: int = Field(4, ge=1)
    """Most images of a request."""
    default_num_frames: int = Field(81, ge=1)
    """Frames of a video whose request names none, for a base that makes videos."""
    max_num_frames: int = Field(81, ge=1)
    """Most frames of a video, for a base that makes videos."""
    max_image_bytes: int = Field(MAX_IMAGE_BYTES, ge=1, le=MAX_IMAGE_BYTES)
    """Largest file of an initial image, and of a mask."""
    max_image_pixels: int = Field(1 << 26, ge=1)
    """Most pixels of an initial image, and of a mask, as they are sent: what decoding one may cost in memory."""
    image_metadata: bool = True
    """Write into every image what made it: prompt, adapters, seed and the other parameters."""
    max_sequence_length: int = Field(512, ge=1)
    """Tokens of the prompt for the T5 text encoder."""

    @field_validator("compile_cache_dir", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("compile_cache_dir")
    @classmethod
    def _absolute(cls, folder: Path | None) -> Path | None:
        return folder.expanduser().absolute() if folder else None

    @field_validator("batch_sizes", mode="before")
    @classmethod
    def _split_batch_sizes(cls, value: object) -> object:
        return tuple(int(size) for size in value.split(",")) if isinstance(value, str) else value

    @field_validator("batch_sizes")
    @classmethod
    def _sorted_from_one(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if sorted(set(value))[:1] != [1]:
            raise ValueError("batch_sizes must be positive and contain 1")
        return tuple(sorted(set(value)))

    @field_validator("resolutions", mode="before")
    @classmethod
    def _split_resolutions(cls, value: object) -> object:
        return tuple(parse_resolution(text) for text in value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _arena_holds_one_sample(self) -> "ExecutorSettings":
        by_number = not (self.arena_bytes or self.arena_share)
        if by_number and self.rows_per_sample >= self.arena_rows:
            raise ValueError(
                f"arena_rows ({self.arena_rows}) must exceed rows_per_sample ({self.rows_per_sample}): "
                "one row is kept zero"
            )
        return self
