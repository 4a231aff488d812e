"""Layouts, packed adapters, requests and jobs for tests of the executor."""

import hashlib
import queue
import time
from collections.abc import Sequence

import torch

from executor.adapters import Fetched
from executor.arena import TORCH_DTYPES
from executor.jobs import AdapterChoice, Event, Failed, Finished, ImageDone, Job, Parameters, StepDone
from executor.store_client import PackedAdapter
from loraplex.layout import DTYPE_SIZES, Layout, TargetModule
from loraplex.packed import PackedHeader

FILE_HEADER_BYTES = 8


def small_layout(dtype: str = "F32") -> Layout:
    """Four modules: two linear layers, a convolution, a linear layer of another component."""
    modules = (
        TargetModule("transformer", "to_q", "linear", 4, 6),
        TargetModule("transformer", "to_k", "linear", 4, 6),
        TargetModule("transformer", "conv", "conv2d", 2, 3, (3, 3)),
        TargetModule("text_encoder", "fc1", "linear", 5, 7),
    )
    return Layout("tiny", "FluxPipeline", dtype, modules)


def packed(
    layout: Layout, rank: int, modules: Sequence[int] | None = None, *, seed: int = 0, scale: float = 1.0
) -> PackedAdapter:
    """A packed adapter of random rows; the same arguments give the same digest."""
    indexes = tuple(range(len(layout.modules)) if modules is None else modules)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(rank, layout.packed_width(indexes), generator=generator) * scale
    return of_rows(layout, rows.to(TORCH_DTYPES[layout.dtype]), indexes)


def of_rows(layout: Layout, rows: torch.Tensor, modules: Sequence[int]) -> PackedAdapter:
    """A packed adapter with these rows, whether they fit or not."""
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(data + repr(modules).encode()).hexdigest()
    size = FILE_HEADER_BYTES + rows.numel() * DTYPE_SIZES[layout.dtype]
    return PackedAdapter(PackedHeader(digest, size, len(rows), tuple(modules), "c" * 40), rows)


def fetched(*adapters: PackedAdapter) -> tuple[Fetched, ...]:
    """The adapters as they come out of host memory."""
    return tuple(Fetched(adapter, "store", 0.5) for adapter in adapters)


def parameters(**fields: object) -> Parameters:
    """Parameters of a small image on tiny-flux, with `fields` instead of the defaults."""
    defaults: dict[str, object] = {
        "prompt": "a red circle",
        "negative_prompt": "",
        "adapters": (),
        "seed": 1,
        "width": 64,
        "height": 64,
        "num_inference_steps": 2,
        "guidance_scale": 3.5,
        "true_cfg_scale": 1.0,
        "num_images": 1,
        "image_format": "PNG",
    }
    return Parameters(**{**defaults, **fields})  # type: ignore[arg-type]


class Watched:
    """A job whose events are kept."""

    def __init__(self, request_id: str = "job", deadline: float | None = None, **fields: object) -> None:
        self.seen: list[Event] = []
        self._coming: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.job = Job(request_id, parameters(**fields), deadline, self._coming.put)

    def next(self, timeout_s: float = 20.0) -> Event:
        """The next event; queue.Empty when none comes."""
        event = self._coming.get(timeout=timeout_s)
        self.seen.append(event)
        return event

    def until_step(self, step: int) -> None:
        """Wait for StepDone(step)."""
        while self.next() != StepDone(step):
            pass

    def end(self, timeout_s: float = 30.0) -> Finished | Failed:
        """The last event."""
        give_up = time.monotonic() + timeout_s
        while not isinstance(event := self.next(give_up - time.monotonic()), Finished | Failed):
            pass
        return event

    @property
    def images(self) -> list[ImageDone]:
        """The images so far."""
        return [event for event in self.seen if isinstance(event, ImageDone)]

    @property
    def steps(self) -> int:
        """Denoising steps so far."""
        return sum(isinstance(event, StepDone) for event in self.seen)


def choices(*strengths: float) -> tuple[AdapterChoice, ...]:
    """Adapters a, b, c, ... with these strengths."""
    return tuple(AdapterChoice(name, strength) for name, strength in zip("abcdefgh", strengths, strict=False))
