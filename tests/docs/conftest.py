"""Both services as real processes on tiny-flux, started once per module, and a folder that looks like a checkout."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.local import Local, Running, services
from tests.docs.documents import ROOT

ADAPTERS = ROOT / "models/tiny_flux/adapters"
# Where `make run` listens.
USUAL = {"store": "127.0.0.1:50051", "executor": "127.0.0.1:50061"}
USUAL_METRICS = {"store_metrics": "127.0.0.1:9451", "executor_metrics": "127.0.0.1:9461"}


@dataclass(frozen=True)
class Workplace:
    """A folder with links to all that a checkout has, beside two services that serve `.run/loras` in it."""

    folder: Path
    running: Running

    @property
    def loras(self) -> Path:
        """The store's local folder."""
        return self.folder / ".run/loras"

    def run(self, command: str | list[str], timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command as a reader would: in bash, in the checkout, with what `make install` installed."""
        return subprocess.run(
            ["bash", "-c", self.moved(command)] if isinstance(command, str) else command,
            cwd=self.folder,
            env={**os.environ, **self._variables()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )

    def moved(self, text: str) -> str:
        """`text` with the addresses of these services for the usual ones."""
        for name, address in {**USUAL, **USUAL_METRICS}.items():
            text = text.replace(address, getattr(self.running, name))
        return text

    def _variables(self) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
            "LORAPLEX_STORE": self.running.store,
            "LORAPLEX_EXECUTOR": self.running.executor,
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
            "TERM": "dumb",
        }


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A new checkout with its services, as `make run ADAPTERS=.run/loras` starts them, but not compiled."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    loras = folder / ".run/loras"
    loras.mkdir(parents=True)
    for path in ADAPTERS.glob("*.safetensors"):
        shutil.copy(path, loras)
    local = Local(adapters=loras, cache=folder / ".run/cache", store_port=0, executor_port=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAPLEX_EXECUTOR_COMPILE", "off")
        with services(local) as running:
            yield Workplace(folder, running)
