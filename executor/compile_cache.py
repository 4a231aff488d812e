"""Compiled artefacts kept from one start of an executor to the next.

torch keeps what it compiles in a folder, and trusts what lies there: an executor that was killed while it compiled
leaves an empty library behind, and the next one fails on it. Here every process works in a folder of its own. Only once
its warm-up has succeeded is that kept, with the sha256 of every file; and only what still has these is used again. The
name of what is kept is a hash of all that decides about compiled code, so nothing foreign is ever found.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import structlog
import torch

_log = structlog.stdlib.get_logger("loraplex.executor")

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MANIFEST = "manifest.json"
_KEPT = 4
_at_work: set[Path] = set()


@contextmanager
def compile_cache(folder: Path | None, facts: Mapping[str, object]) -> Iterator[None]:
    """Compile in here with what earlier starts left for the same `facts`; keep it when the block ends well.

    None leaves torch's own cache in place. A folder that cannot be read or written costs a warning and time, no more.
    """
    if folder is None:
        yield
        return
    kept = folder / hashlib.sha256(json.dumps(dict(facts), sort_keys=True, default=str).encode()).hexdigest()[:32]
    work = Path(tempfile.mkdtemp(prefix="loraplex-compiled-"))
    _at_work.add(work)
    found = _restore(kept, work)
    _log.info("compiled artefacts", found=found, folder=str(kept))
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(work)
    try:
        yield
        if not found:
            _keep(work, kept)
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
        shutil.rmtree(work, ignore_errors=True)
        _at_work.discard(work)


def abandon() -> None:
    """Remove the folders of compilations that are under way, as their process is about to end; they fail."""
    for work in tuple(_at_work):
        shutil.rmtree(work, ignore_errors=True)


def machine_facts() -> dict[str, object]:
    """What decides about compiled code beside the model: the versions, the processor, the GPU."""
    packages = ("torch", "diffusers", "transformers", "loraplex")
    return {
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _restore(kept: Path, work: Path) -> bool:
    """Copy what is kept into `work`; False when there is nothing, or nothing that can be trusted."""
    try:
        digests = json.loads((kept / _MANIFEST).read_text())
        for name, digest in digests.items():
            content = (kept / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError(f"{name} is not as it was kept")
            target = work / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod((kept / name).stat().st_mode)
        os.utime(kept)
    except FileNotFoundError as error:
        if error.filename != str(kept / _MANIFEST):
            _discard(kept, work, error)
        return False
    except (OSError, ValueError, AttributeError) as error:
        _discard(kept, work, error)
        return False
    return True


def _discard(kept: Path, work: Path, error: Exception) -> None:
    _log.warning("compiled artefacts discarded", reason=str(error))
    shutil.rmtree(kept, ignore_errors=True)
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _keep(work: Path, kept: Path) -> None:
    """Publish `work` under its final name in one step, and drop what was not used for longest."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=kept.parent))
        try:
            shutil.copytree(work, fresh, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.lock"))
            files = sorted(path for path in fresh.rglob("*") if path.is_file())
            digests = {str(path.relative_to(fresh)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
            (fresh / _MANIFEST).write_text(json.dumps(digests))
            fresh.rename(kept)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        others = sorted((path for path in kept.parent.iterdir() if (path / _MANIFEST).exists()), key=_last_used)
        for path in others[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        _log.warning("compiled artefacts not kept", reason=str(error))


def _last_used(path: Path) -> float:
    return path.stat().st_mtime
