"""The import rules of the architecture, held to the code by reading its syntax trees. Nothing is imported here.

When this fails, the message names the module, what it imports, and the rule. A new module of the executor must be
given its place in EXECUTOR_LAYERS.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "loraplex": ROOT / "client/loraplex",
    "adapter_store": ROOT / "adapter_store",
    "executor": ROOT / "executor",
}

# A module may import from its own layer, without cycles, and from those below.
EXECUTOR_LAYERS = (
    {"__main__"},
    {"service"},
    {"server", "engine"},
    {"probe"},
    {"scheduler", "adapters", "denoiser", "residency", "calls", "runs", "loading"},
    {"compilation"},
    {"rows", "arena", "pipeline", "store_client", "lora", "compile_cache", "recipe", "memory"},
    {"arguments", "family", "fixed_shapes", "previews"},
    {"requests", "adapter_choices", "images", "image_metadata", "input_images", "event_queue", "messages"},
    {"jobs", "config", "errors", "metrics"},
)

SERVING_ONLY = ("pydantic", "pydantic_settings", "structlog", "prometheus_client", "grpc_health", "grpc_reflection")
ML = ("torch", "diffusers", "transformers", "peft", "safetensors")
GRPC = ("grpc", "grpc_status", "grpc_health", "grpc_reflection")
GRPC_EDGES = (
    *("loraplex.client", "loraplex.channel", "loraplex.status", "loraplex.serving"),
    *("adapter_store.server", "adapter_store.service", "adapter_store.__main__"),
    *("executor.server", "executor.service", "executor.store_client", "executor.__main__"),
)


def inside(module: str, *packages: str) -> bool:
    """Whether a dotted name is one of `packages` or lies in one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@dataclass(frozen=True)
class Rule:
    """Modules that `applies` picks import nothing that lies in `forbidden`."""

    says: str
    applies: Callable[[str], bool]
    forbidden: tuple[str, ...]


RULES = (
    Rule("the store does not know the executor", lambda m: inside(m, "adapter_store"), ("executor",)),
    Rule("the executor does not know the store", lambda m: inside(m, "executor"), ("adapter_store",)),
    Rule("loraplex knows neither service", lambda m: inside(m, "loraplex"), ("adapter_store", "executor")),
    # What a target module is stands once, for the executor and for the store's catalogue of bases.
    Rule("loraplex needs no torch", lambda m: inside(m, "loraplex") and m != "loraplex.targets", ML),
    Rule("a client needs no torch", lambda m: inside(m, "loraplex"), ("loraplex.targets",)),
    Rule(
        "a store that serves needs no torch",
        lambda m: inside(m, "adapter_store") and not inside(m, "adapter_store.bases.build"),
        ("torch", "diffusers", "transformers", "peft", "loraplex.targets"),
    ),
    Rule(
        "the client needs nothing of the extra `serving`",
        lambda m: inside(m, "loraplex") and not inside(m, "loraplex.serving"),
        (*SERVING_ONLY, "loraplex.serving"),
    ),
    Rule("scheduler and rows are pure", lambda m: inside(m, "executor.scheduler", "executor.rows"), (*ML, *GRPC)),
    Rule(
        "diffusers only in executor.pipeline and the store's bases",
        lambda m: not inside(m, "executor.pipeline", "adapter_store.bases.build"),
        ("diffusers",),
    ),
    Rule("diskcache only in adapter_store.index", lambda m: not inside(m, "adapter_store.index"), ("diskcache",)),
    Rule("grpc only at the edges", lambda m: not inside(m, *GRPC_EDGES), GRPC),
)


@dataclass(frozen=True)
class Module:
    """One source file, by its dotted name."""

    name: str
    tree: ast.Module

    @cached_property
    def imports(self) -> list[str]:
        """Every dotted name that it imports anywhere, as in `a.b` and `a.b.c` for `from a.b import c`."""
        return [name for node in ast.walk(self.tree) for name in _imported(node, self.name)]


def module(name: str, source: str) -> Module:
    """A module of made-up source."""
    return Module(name, ast.parse(source))


def modules() -> list[Module]:
    """All modules of the three packages, without the generated ones."""
    return [
        Module(_dotted(package, folder, path), ast.parse(path.read_text()))
        for package, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
        if "v1" not in path.parts
    ]


def broken_rules(code: list[Module]) -> list[str]:
    """One sentence for every import that breaks a rule."""
    return [
        f"{m.name} imports {imported}, but {rule.says}"
        for m in code
        for rule in RULES
        if rule.applies(m.name)
        for imported in m.imports
        if inside(imported, *rule.forbidden)
    ]


def broken_layers(code: list[Module]) -> list[str]:
    """One sentence for every import of the executor that points up, goes in a circle, or has no place."""
    layer_of = {name: number for number, layer in enumerate(EXECUTOR_LAYERS) for name in layer}
    arrows: dict[str, set[str]] = {}
    names = {m.name.partition(".")[2] for m in code if inside(m.name, "executor")} - {"__init__"}
    for m in code:
        if m.name.partition(".")[2] in names and inside(m.name, "executor"):
            targets = {i.split(".")[1] for i in m.imports if i.startswith("executor.")}
            arrows[m.name.partition(".")[2]] = (targets & names) - {m.name.partition(".")[2]}
    complaints = [f"executor.{name} has no place in EXECUTOR_LAYERS" for name in sorted(names - layer_of.keys())]
    for name, targets in arrows.items():
        for target in sorted(targets):
            if layer_of.get(target, 99) < layer_of.get(name, -1):
                complaints.append(f"executor.{name} imports executor.{target}, which is a layer above it")
    return complaints + [f"imports go in a circle: {' -> '.join(circle)}" for circle in _circles(arrows)]


def undocumented(code: list[Module]) -> list[str]:
    """Every public module, class, function and method without a docstring."""
    return [
        f"{m.name}: {name}" for m in code for name, node in _public(m.tree, "module") if not ast.get_docstring(node)
    ]


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _public(node: Documented, name: str) -> Iterator[tuple[str, Documented]]:
    yield name, node
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                yield from _public(child, f"{name}.{child.name}".removeprefix("module."))


def _imported(node: ast.AST, importer: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            base = ".".join([*importer.split(".")[: -node.level], *([base] if base else [])])
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return []


def _dotted(package: str, folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join([package, *parts])


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(arrows.get(name, ())):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(arrows):
        visit(name, [])
    return found


def test_no_module_imports_what_its_rules_forbid():
    assert broken_rules(modules()) == []


def test_the_executors_imports_point_downwards():
    assert broken_layers(modules()) == []


def test_every_public_name_has_a_docstring():
    assert undocumented(modules()) == []


def test_only_contract_and_e2e_tests_import_both_services():
    both = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        imports = module("test", path.read_text()).imports
        sides = [side for side in ("adapter_store", "executor") if any(inside(name, side) for name in imports)]
        if len(sides) == 2 and path.relative_to(ROOT / "tests").parts[0] not in ("contract", "e2e"):
            both.append(str(path.relative_to(ROOT)))
    assert both == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("adapter_store.store", "import executor.rows"),
        ("executor.adapters", "def f():\n    from adapter_store import refs"),
        ("loraplex.client", "import torch"),
        ("loraplex.packed", "from pydantic import BaseModel"),
        ("loraplex.__init__", "from . import serving"),
        ("loraplex.client", "from .serving import run"),
        ("loraplex.serving.server", "from executor import engine"),
        ("executor.rows", "import torch.nn"),
        ("executor.scheduler", "if TYPE_CHECKING:\n    import torch"),
        ("executor.engine", "from diffusers import FluxPipeline"),
        ("adapter_store.store", "import diskcache"),
        ("executor.jobs", "import grpc"),
        ("adapter_store.resolve", "from grpc import aio"),
    ],
)
def test_a_forbidden_import_is_found(name: str, source: str):
    assert broken_rules([module(name, source)])


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("executor.engine", "import torch\nfrom executor.rows import RowAllocator"),
        ("executor.pipeline", "import diffusers"),
        ("loraplex.serving.settings", "import pydantic"),
        ("adapter_store.index", "import diskcache"),
        ("executor.store_client", "import grpc"),
    ],
)
def test_an_allowed_import_is_not(name: str, source: str):
    assert broken_rules([module(name, source)]) == []


def test_an_import_of_a_layer_above_is_found():
    code = [module("executor.rows", "from executor import engine"), module("executor.engine", "")]
    assert broken_layers(code) == ["executor.rows imports executor.engine, which is a layer above it"]


def test_a_circle_inside_a_layer_is_found():
    code = [module("executor.rows", "import executor.arena"), module("executor.arena", "from executor.rows import R")]
    assert broken_layers(code) == ["imports go in a circle: arena -> rows -> arena"]


def test_a_module_without_a_place_is_found():
    assert broken_layers([module("executor.utils", "")]) == ["executor.utils has no place in EXECUTOR_LAYERS"]


def test_a_missing_docstring_is_found_and_a_private_name_needs_none():
    source = (
        '"""Doc."""\nclass A:\n    """Doc."""\n    def b(self): ...\n    def _c(self): ...\ndef d(): ...\ndef _e(): ...'
    )
    assert undocumented([module("m", source)]) == ["m: A.b", "m: d"]
