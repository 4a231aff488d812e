"""The command line: generate, cancel, adapters, inspect, model. Answers go to stdout, progress and errors to stderr."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast

import typer

from loraplex import terminal
from loraplex.adapter_arguments import parse_adapter
from loraplex.client import DEFAULT_EXECUTOR, DEFAULT_STORE, Client, Result
from loraplex.errors import ServiceError, ServiceUnavailable
from loraplex.events import FORMAT_TO_WIRE, OutputFormat
from loraplex.options import AdapterSelection, GenerateOptions, Priority
from loraplex.output_files import write_images, writing_previews

app = typer.Typer(
    name="loraplex",
    help="Generate images with LoRA adapters on a warm diffusion model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

EXIT_INTERRUPTED = 130

_SUFFIXES: dict[str, OutputFormat] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}

ExecutorOption = Annotated[str, typer.Option(envvar="LORAPLEX_EXECUTOR", help="Address of the executor.")]
StoreOption = Annotated[str, typer.Option(envvar="LORAPLEX_STORE", help="Address of the adapter store.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def main() -> None:
    """Run the command line. Exits with 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    app()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the image shows.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; several images are numbered.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "-a",
            help="REF[:STRENGTH]; repeat it to mix, as in -a sketch:0.8 -a org/name@rev. Settings may follow after a "
            "space: start=, end= (0 to 1, of the steps), components=, waived=, max_rank=, max_error=, denoiser=, as in "
            "-a 'sketch:0.8 end=0.5 components=transformer'.",
        ),
    ] = None,
    negative_prompt: Annotated[str, typer.Option(help="What it must not show.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed of the noise; random when left out.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    steps: Annotated[int | None, typer.Option("--num-inference-steps", "--steps", help="Denoising steps.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="As diffusers defines it for the model.")] = None,
    true_cfg_scale: Annotated[float | None, typer.Option(help="True guidance; above 1 for a negative prompt.")] = None,
    num_images: Annotated[int | None, typer.Option("--num-images", "-n", help="How many images.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    fps: Annotated[float, typer.Option(min=0.1, max=1000, help="Frames a second of a video in a .webp file.")] = 16.0,
    image: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="An image to start from.")] = None,
    mask: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Where to paint --image anew: white.")
    ] = None,
    image_strength: Annotated[float | None, typer.Option(help="How far --image is changed, up to 1.")] = None,
    preview: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder for previews, one file each.")
    ] = None,
    preview_every_steps: Annotated[int | None, typer.Option(min=1, help="How often --preview gets one; 1.")] = None,
    priority: Annotated[str, typer.Option(help="low, normal, high.")] = "normal",
    request_id: Annotated[str | None, typer.Option(help="For `loraplex cancel` and the logs.")] = None,
    image_format: Annotated[str | None, typer.Option("--format", help="png, jpeg, webp; else by the suffix.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 120.0,
    executor: ExecutorOption = DEFAULT_EXECUTOR,
) -> None:
    """Generate images and write them to files."""
    output_format = choose_format(output, image_format)
    check_writable(output)
    if preview_every_steps and not preview:
        raise typer.BadParameter("name a folder with --preview, too", param_hint="--preview-every-steps")
    options: GenerateOptions = {
        "adapters": _adapters(adapter or ()),
        "negative_prompt": negative_prompt,
        "seed": seed,
        "width": width,
        "height": height,
        "num_inference_steps": steps,
        "guidance_scale": guidance_scale,
        "true_cfg_scale": true_cfg_scale,
        "num_images": num_images,
        "num_frames": num_frames,
        "initial_image": image,
        "mask_image": mask,
        "image_strength": image_strength,
        "preview_every_steps": (preview_every_steps or 1) if preview else None,
        "priority": cast("Priority", priority),
        "output_format": output_format,
        "request_id": request_id,
    }
    with _failures_reported(), Client(executor=executor, timeout_s=timeout_s) as client:
        events = client.generate(prompt, **options)
        with events, terminal.Progress() as progress:
            shown = progress.following(events)
            result = Result.of(writing_previews(preview, shown) if preview else shown)
        typer.echo(terminal.closing_line(_written(output, result, fps), result))


@app.command()
def cancel(
    request_id: Annotated[str, typer.Argument(help="The id that `generate --request-id` was given.")],
    executor: ExecutorOption = DEFAULT_EXECUTOR,
) -> None:
    """End the unfinished requests of an id. Exits with 1 when there are none."""
    with _failures_reported(), Client(executor=executor) as client:
        if not client.cancel(request_id):
            typer.echo(f"No request {request_id} is unfinished.", err=True)
            raise typer.Exit(1)
        typer.echo(f"cancelled {request_id}")


@app.command()
def adapters(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """List the adapters that the store can serve without a download."""
    with _failures_reported(), Client(store=store) as client:
        listed = client.adapters()
        terminal.print_json(listed) if as_json else terminal.print_adapters(listed)


@app.command()
def inspect(
    ref: Annotated[str, typer.Argument(help="The adapter reference: org/name[@revision][:file], or a local name.")],
    executor: ExecutorOption = DEFAULT_EXECUTOR,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Tell what an adapter's file contains, and whether it can be applied to the executor's model."""
    with _failures_reported(), Client(executor=executor, store=store) as client:
        try:
            layout_digest = client.model().layout_digest
        except ServiceUnavailable:
            layout_digest = ""
        inspection = client.inspect(ref, layout_digest=layout_digest)
        terminal.print_json(inspection) if as_json else terminal.print_inspection(ref, inspection)


@app.command()
def model(executor: ExecutorOption = DEFAULT_EXECUTOR, as_json: JsonOption = False) -> None:
    """Describe the base model that the executor serves and the limits of a request."""
    with _failures_reported(), Client(executor=executor) as client:
        described = client.model()
        terminal.print_json(described) if as_json else terminal.print_model(described)


def _adapters(texts: Sequence[str]) -> list[AdapterSelection]:
    try:
        return [parse_adapter(text) for text in texts]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--adapter") from error


def choose_format(output: Path, asked: str | None) -> OutputFormat:
    """The format of `output`, by its suffix or as asked; a usage error when these contradict, or neither tells."""
    by_suffix = _SUFFIXES.get(output.suffix.lower())
    if asked is not None and asked not in FORMAT_TO_WIRE:
        raise typer.BadParameter(f"{asked} is none of {', '.join(FORMAT_TO_WIRE)}", param_hint="--format")
    if by_suffix is None and asked is None:
        suffixes = ", ".join(_SUFFIXES)
        raise typer.BadParameter(f"{output.name} has none of the suffixes {suffixes}", param_hint="--output")
    if asked is not None and by_suffix not in (None, asked):
        raise typer.BadParameter(f"{asked} does not go into a file called {output.name}", param_hint="--format")
    return by_suffix or cast("OutputFormat", asked)


def check_writable(output: Path) -> None:
    """A usage error, before anything is generated, when `output` could not be written afterwards."""
    try:
        why = _why_not_writable(output)
    except OSError as error:
        why = f"{terminal.shown_path(output)}: {error.strerror or error}"
    if why:
        raise typer.BadParameter(why, param_hint="--output")


def _why_not_writable(output: Path) -> str:
    folder = output.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {terminal.shown_path(folder)}"
    if output.is_dir():
        return f"{terminal.shown_path(output)} is a folder"
    unwritable = [path for path in (folder, output) if path.exists() and not os.access(path, os.W_OK)]
    return f"{terminal.shown_path(unwritable[0])} cannot be written" if unwritable else ""


def _written(output: Path, result: Result, fps: float) -> list[Path]:
    """The files that were written; in a fresh folder when they cannot be where they were wanted."""
    try:
        return write_images(output, result.encoded, fps=fps)
    except OSError as error:
        rescue = Path(tempfile.mkdtemp(prefix="loraplex-")) / f"image{output.suffix}"
        paths = write_images(rescue, result.encoded, fps=fps)
        terminal.print_failure(f"{terminal.shown_path(output)} cannot be written: {error.strerror or error}")
        typer.echo(terminal.closing_line(paths, result))
        raise typer.Exit(1) from error


@contextmanager
def _failures_reported() -> Iterator[None]:
    try:
        yield
    except ServiceError as error:
        terminal.print_error(error)
        raise typer.Exit(1) from error
    except OSError as error:  # of files: those of connections come as ServiceError
        terminal.print_failure(ascii(str(error))[1:-1])
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt
