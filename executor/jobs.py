"""A job: one checked Generate request, the events it sends, and whether it is over. Any thread may use it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from loraplex.errors import Cancelled, DeadlineExceeded, ServiceError
from loraplex.pack_options import EXACTLY, PackOptions

ReadyFrom = Literal["rows", "host_memory", "store"]
ImageFormat = Literal["PNG", "JPEG", "WEBP"]
Mode = Literal["text_to_image", "image_to_image", "inpaint", "text_to_video"]


@dataclass(frozen=True)
class AdapterChoice:
    """One adapter of a request."""

    ref: str
    strength: float
    start: float = 0.0  # of the denoising steps, 0 to 1: step i of n sees the adapter when start <= i / n < end
    end: float = 1.0
    components: tuple[str, ...] = ()  # apply to these only; empty: to all that the file adapts
    options: PackOptions = EXACTLY

    def applies(self, component: str, progress: float) -> bool:
        """Whether a call of `component` sees the adapter when this part of the steps, below 1, is done.

        Text encoders run before the steps, so for them `progress` is always 0.
        """
        if self.components and component not in self.components:
            return False
        if component.startswith("text_encoder"):
            return self.start == 0
        # Noise schedulers of a higher order call back more often than there are steps: the end stays open at 1.
        return self.start <= progress and (progress < self.end or self.end == 1)


@dataclass(frozen=True)
class Parameters:
    """What a job makes; every field is checked and has its final value."""

    prompt: str
    negative_prompt: str
    adapters: tuple[AdapterChoice, ...]
    seed: int
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    true_cfg_scale: float
    num_images: int
    image_format: ImageFormat
    num_frames: int = 1  # of every video; 1 for images
    initial_image: Image.Image | None = None  # RGB, width x height
    mask_image: Image.Image | None = None  # L, width x height; white is painted anew
    initial_image_sha256: str = ""  # in hex, of the bytes that came with the request
    mask_image_sha256: str = ""
    image_strength: float = 0.0  # diffusers' strength; 0 without an initial image
    skipped_steps: int = 0  # how many of num_inference_steps an initial image saves
    preview_every_steps: int = 0  # none at 0
    metadata: bool = True  # write into every image what made it

    @property
    def num_steps(self) -> int:
        """The denoising steps that are run."""
        return self.num_inference_steps - self.skipped_steps


@dataclass(frozen=True)
class AdapterReady:
    """One adapter of the job is in the rank rows."""

    ref: str
    strength: float
    digest: str
    commit: str
    rank: int
    modules: int
    ready_from: ReadyFrom
    fetch_seconds: float
    load_seconds: float


@dataclass(frozen=True)
class StepDone:
    """`step` denoising steps are done."""

    step: int


@dataclass(frozen=True)
class PreviewDone:
    """Image `index` as it is after `step` denoising steps: a small JPEG."""

    step: int
    index: int
    data: bytes


@dataclass(frozen=True)
class ImageDone:
    """Image `index` of the job, or one frame of video `index`, encoded."""

    index: int
    data: bytes
    seed: int
    frame: int = 0


@dataclass(frozen=True)
class Finished:
    """The job did all that was asked."""

    adapters: tuple[AdapterReady, ...]
    recompilations: int
    queue_seconds: float
    denoise_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Failed:
    """The job ended early."""

    error: ServiceError


Event = AdapterReady | StepDone | PreviewDone | ImageDone | Finished | Failed


class Job:
    """One admitted request. `listener` gets its events, from whichever thread they happen on."""

    def __init__(
        self,
        request_id: str,
        parameters: Parameters,
        deadline: float | None,
        listener: Callable[[Event], object],
        priority: int = 0,
    ) -> None:
        """`deadline` is in the time of `time.monotonic()`; a `priority` above 0 is served earlier, one below later."""
        self.request_id = request_id
        self.parameters = parameters
        self.deadline = deadline
        self.priority = priority
        self.admitted_at = time.monotonic()
        self._listener = listener
        self._cancelled = threading.Event()

    def __repr__(self) -> str:
        return f"Job({self.request_id}, adapters={len(self.parameters.adapters)}, over={self.over() is not None})"

    def emit(self, event: Event) -> None:
        """Give `event` to the listener. A listener whose event loop is closed has nobody left: the job is cancelled."""
        try:
            self._listener(event)
        except RuntimeError:
            self.cancel()

    def cancel(self) -> None:
        """End the job at its next denoising step."""
        self._cancelled.set()

    def over(self) -> ServiceError | None:
        """Why the job must not go on, or None."""
        if self._cancelled.is_set():
            return Cancelled("The caller cancelled the request.")
        if self.deadline is not None and time.monotonic() > self.deadline:
            return DeadlineExceeded("The deadline passed before the request was done.", remedy="Allow more time.")
        return None
