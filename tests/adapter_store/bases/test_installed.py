"""The catalogue as it is installed: its files are in the wheel, and it needs no torch."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from adapter_store.bases import known_bases
from adapter_store.bases.catalogue import component_configs

ROOT = Path(__file__).parents[3]
SKETCH = ROOT / "models/tiny_flux/adapters/sketch.safetensors"
WITHOUT_TORCH = "import sys; sys.modules.update(dict.fromkeys(('torch', 'diffusers', 'transformers', 'peft'))); "


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds. The wheel is built from a copy, so that nothing is left in the sources."""
    sources, wheels, target = (tmp_path_factory.mktemp(name) for name in ("sources", "wheels", "site"))
    for name in ("adapter_store", "client", "executor"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(wheels), str(sources)], check=True)
    (wheel,) = wheels.glob("loraplex-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_installed(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the installed packages, without torch."""
    own = f"{WITHOUT_TORCH} sys.path.insert(0, {str(folder)!r}); {code}"
    environment = {**os.environ, "LORAPLEX_STORE_CACHE_DIR": str(folder.parent / "cache"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", own], capture_output=True, text=True, cwd=folder.parent, env=environment
    )


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_catalogue(installed: Path):
    of_the_sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "adapter_store/bases").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    in_the_wheel = {
        path.relative_to(installed).as_posix()
        for path in (installed / "adapter_store/bases").rglob("*")
        if path.is_file()
    }
    assert in_the_wheel == of_the_sources
    assert len(in_the_wheel) > 2 * len(component_configs())


@pytest.mark.slow
def test_every_base_is_found_by_an_installed_store_without_torch(installed: Path):
    code = (
        "import adapter_store.bases as bases; "
        "print(bases.__file__); [print(name, layout.digest) for name, layout in bases.candidates().items()]"
    )
    done = run_installed(installed, code)
    assert done.returncode == 0, done.stderr
    file, *lines = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed)
    assert [line.split()[0] for line in lines] == list(known_bases())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "status", "word"),
    [("flux.1-dev", 3, ""), (str(SKETCH.parents[1] / "base"), 1, "pip install 'loraplex[bases]'")],
)
def test_the_command_line_says_what_to_install_for_a_base_that_needs_torch(
    installed: Path, base: str, status: int, word: str
):
    code = f"from adapter_store.__main__ import main; main(['inspect', {str(SKETCH)!r}, '--base', {base!r}])"
    done = run_installed(installed, code)
    assert done.returncode == status, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
