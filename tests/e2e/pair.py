"""What the tests of this folder share: the running pair of services, a record of its denoiser, and where files are."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from executor.service import LoadedModel
from loraplex import Client

TINY_FLUX = Path(__file__).parents[2] / "models/tiny_flux"
BASE = TINY_FLUX / "base"
ADAPTERS = TINY_FLUX / "adapters"
MAX_SEQUENCE_LENGTH = 12


@dataclass
class Pair:
    """The two services: where they listen, the adapter folder they serve, and the model inside the executor."""

    executor: str
    store: str
    root: Path
    model: LoadedModel

    def client(self) -> Client:
        """A new client of both."""
        return Client(executor=self.executor, store=self.store)


@dataclass
class DenoiserRecord:
    """Arguments and outputs of the denoiser's calls, as the pipelines see them."""

    calls: list[tuple[dict[str, Any], torch.Tensor]] = field(default_factory=list)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The outputs in order."""
        return [output for _, output in self.calls]
