"""The files that the command line writes: images, frames or an animation of a video, previews."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from loraplex.events import Event, Image, Preview


def write_images(output: Path, images: Sequence[Image], *, fps: float = 16.0) -> list[Path]:
    """Write one image to `output`; several to numbered files beside it, as in cat-0.png, cat-1.png.

    A video is one animated .webp file, or numbered frames where `output` has another suffix, as in cat-007.png.
    """
    videos = [list(frames) for _, frames in groupby(images, key=lambda image: image.index)]
    written: list[Path] = []
    for video in videos:
        path = output if len(videos) == 1 else output.with_stem(f"{output.stem}-{video[0].index}")
        written += _write_video(path, video, fps) if len(video) > 1 else _write(path, video[0])
    return written


def writing_previews(folder: Path, events: Iterable[Event]) -> Iterator[Event]:
    """Pass the events on, writing every preview to `folder`, as in preview-0-004.jpg for image 0 after 4 steps."""
    for event in events:
        if isinstance(event, Preview):
            (folder / f"preview-{event.index}-{event.step:03}.jpg").write_bytes(event.data)
        yield event


def _write(path: Path, image: Image) -> list[Path]:
    path.write_bytes(image.data)
    return [path]


def _write_video(path: Path, frames: Sequence[Image], fps: float) -> list[Path]:
    if path.suffix.lower() == ".webp":
        first, *others = [frame.to_pil() for frame in frames]
        first.save(path, "WEBP", save_all=True, append_images=others, duration=round(1000 / fps), loop=0, quality=90)
        return [path]
    width = max(3, len(str(len(frames) - 1)))
    return [
        written for frame in frames for written in _write(path.with_stem(f"{path.stem}-{frame.frame:0{width}}"), frame)
    ]
