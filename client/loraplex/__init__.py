"""loraplex: many LoRA adapters, multiplexed over one warm, compiled diffusion model. This is what a backend installs.

- `Client`: `generate` (a stream of typed events), `generate_image` (PIL images), `model`, `adapters`, `inspect`, ...
- `loraplex.events`: Queued, AdapterReady, StepDone, Preview, Image, Summary
- `loraplex.errors`: every error that a call can raise, with code, reason and remedy
- `loraplex.v1`: the stubs generated from protos/loraplex/v1
- `loraplex.serving`: how a service here starts (extra `serving`)
"""

from loraplex.client import Client, Result, Stream
from loraplex.errors import ServiceError
from loraplex.events import AdapterReady, AppliedAdapter, Event, Image, Preview, Queued, StepDone, Summary
from loraplex.options import AdapterSelection, GenerateOptions
from loraplex.pack_options import PackOptions

__all__ = [
    "AdapterReady",
    "AdapterSelection",
    "AppliedAdapter",
    "Client",
    "Event",
    "GenerateOptions",
    "Image",
    "PackOptions",
    "Preview",
    "Queued",
    "Result",
    "ServiceError",
    "StepDone",
    "Stream",
    "Summary",
]
