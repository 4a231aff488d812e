"""The demo: start both services, draw every adapter over gRPC, write a contact sheet, print what it took."""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.local import ROOT, Local, Running, StartFailed, exit_on_signals, services
from examples.contact_sheet import Row, contact_sheet
from loraplex import AdapterReady, Client, Result

PROMPTS = (
    "a cat on a blue background",
    "a panda on a red background",
    "a red circle on a white background",
)
# Adapters that mix well; others take their place where they are missing.
MIXED = ("popart", "sketch")
MIX_STRENGTH = 0.6
SEED = 7
_CAPTION = "fetch: until it is in host memory; the store is asked each time whether the name still means the same"
LOG = ROOT / ".run/demo.log"

# Without a terminal, rich would fold the table into 80 columns.
_console = Console() if Console().is_terminal else Console(width=120)


@dataclass(frozen=True)
class Recipe:
    """One row of the sheet: the adapters to apply, in words and as the client takes them."""

    title: str
    adapters: Mapping[str, float]
    section: str = ""


def recipes(refs: Sequence[str]) -> list[Recipe]:
    """The rows to draw: none, every adapter alone, two of them mixed, and one at three strengths."""
    rows = [Recipe("no adapter", {}, section="the base model")]
    rows += [Recipe(ref, {ref: 1.0}, section="" if number else "one adapter") for number, ref in enumerate(refs)]
    favourites = sorted(refs, key=lambda ref: ref not in MIXED)  # stable: the rest keep their order
    if len(favourites) > 1:
        mix = dict.fromkeys(favourites[:2], MIX_STRENGTH)
        rows.append(Recipe(" + ".join(mix), mix, section="two adapters in one image"))
    for strength in (0.0, 0.5, 1.0) if favourites else ():
        section = "" if strength else "one adapter at three strengths"
        rows.append(Recipe(f"{favourites[0]} at {strength:g}", {favourites[0]: strength}, section=section))
    return rows


def draw(client: Client, recipe: Recipe) -> list[Result]:
    """One image per prompt, asked for at the same time, as several users would."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        calls = [pool.submit(client.generate_image, prompt, adapters=recipe.adapters, seed=SEED) for prompt in PROMPTS]
        return [call.result() for call in calls]


def row(recipe: Recipe, results: Sequence[Result]) -> Row:
    """The row of a sheet that shows `results`."""
    applied = results[0].summary.adapters
    detail = "\n".join(f"rank {a.rank}, strength {a.strength:g}" for a in applied)
    return Row(recipe.title, detail, [result.image for result in results], recipe.section)


def table(drawn: Sequence[tuple[Recipe, Sequence[Result]]]) -> Table:
    """What every row took: its slowest fetch and load, and the median of its images."""
    columns = ("adapter", "rank", "from", "fetch ms", "load ms", "steps", "denoise ms", "recompilations")
    report = Table(title="per row of the sheet", title_justify="left", caption_justify="left", caption=_CAPTION)
    for column in columns:
        report.add_column(column, no_wrap=True, justify="left" if column in ("adapter", "from") else "right")
    for recipe, results in drawn:
        first = _first_ready(results)
        summaries = [result.summary for result in results]
        report.add_row(
            recipe.title,
            " + ".join(str(a.rank) for a in summaries[0].adapters) or "-",
            ", ".join(dict.fromkeys(ready.ready_from.replace("_", " ") for ready in first)) or "-",
            f"{1e3 * sum(ready.fetch_s for ready in first):.1f}" if first else "-",
            f"{1e3 * sum(ready.load_s for ready in first):.2f}" if first else "-",
            str(summaries[0].steps),
            f"{1e3 * statistics.median(summary.denoise_s for summary in summaries):.0f}",
            str(sum(summary.recompilations for summary in summaries)),
        )
    return report


def _first_ready(results: Sequence[Result]) -> list[AdapterReady]:
    """Of every adapter the report of the request that had to bring it."""
    costliest: dict[str, AdapterReady] = {}
    for result in results:
        for ready in result.adapters:
            known = costliest.get(ready.ref)
            if known is None or ready.fetch_s + ready.load_s > known.fetch_s + known.load_s:
                costliest[ready.ref] = ready
    return list(costliest.values())


def show(running: Running, output: Path) -> int:
    """Draw everything that the store lists, and write the sheet; returns the number of images."""
    with Client(executor=running.executor, store=running.store) as client:
        model = client.model()
        refs = [adapter.ref for adapter in client.adapters() if adapter.local]
        _console.print(f"{model.base_model} on {model.device}, {len(refs)} adapters: {', '.join(refs) or 'none'}")
        drawn = [(recipe, draw(client, recipe)) for recipe in recipes(refs)]
    title = f"{model.base_model}, seed {SEED}, every image from one warm, compiled model"
    contact_sheet(title, PROMPTS, [row(recipe, results) for recipe, results in drawn]).save(output)
    _console.print(table(drawn))
    return sum(len(results) for _, results in drawn)


def main(output: Path, installed_in_s: int) -> int:
    """Run the demo; returns the exit status. `installed_in_s` is what the installation before it took."""
    exit_on_signals()
    is_first = not output.exists()
    LOG.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    _console.print("starting adapter store and executor (loading, compiling, warming up) ...")
    try:
        with (
            LOG.open("w") as log,
            services(
                Local(store_port=0, executor_port=0, executor_flags=("--batch-sizes", "1")),  # half the start
                lambda name, line: print(f"{name:8} | {line}", file=log, flush=True),
            ) as running,
        ):
            ready = time.monotonic()
            images = show(running, output)
            drawn = time.monotonic()
    except StartFailed as error:
        _console.print(f"{error}; the end of {LOG}:", style="red")
        _console.print("\n".join(LOG.read_text().splitlines()[-30:]), markup=False, highlight=False)
        return 1
    done = time.monotonic()
    _console.print(
        f"services ready after {ready - began:.1f} s, {images} images in {drawn - ready:.1f} s, "
        f"stopped in {done - drawn:.1f} s, total {done - began:.1f} s"
    )
    if installed_in_s and is_first:
        from_clone_s = installed_in_s + drawn - began
        _console.print(f"from a fresh clone to {output}: {from_clone_s:.0f} s, {installed_in_s} s of them to install")
    _console.print(f"wrote {output}; the services' log is {LOG}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("output", nargs="?", type=Path, default=Path("demo.png"))
    parser.add_argument("--installed-in", type=int, default=0, metavar="S", help="seconds the installation took")
    arguments = parser.parse_args()
    sys.exit(main(arguments.output, arguments.installed_in))
