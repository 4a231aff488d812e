"""The families of base models, by the name of their diffusers pipeline: whose names their trainers use."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from adapter_store.dialects import flux, flux2, hunyuan_video, ltx, original, sd3, sgm, wan, z_image
from adapter_store.dialects.original import Fused, OriginalName

Table = Callable[[Collection[str]], Iterable[OriginalName]]


@dataclass(frozen=True)
class Family:
    """Base models with the same module names: the pipelines whose names start with `pipelines`, and no digit then."""

    name: str
    pipelines: tuple[str, ...]
    original_names: Table
    fused: tuple[Fused, ...] = original.FUSED

    def has(self, pipeline: str) -> bool:
        """Whether a pipeline is of this family."""
        return any(pipeline.startswith(start) and not pipeline[len(start) :][:1].isdigit() for start in self.pipelines)


def _rows(table: tuple[OriginalName, ...]) -> Table:
    def original_names(paths: Collection[str]) -> Iterator[OriginalName]:
        return original.expand(table, paths)

    return original_names


# SDXL stands before Stable Diffusion, whose name starts like its own.
FAMILIES = (
    Family("SDXL", ("StableDiffusionXL",), sgm.original_names),
    Family("SD3", ("StableDiffusion3",), _rows(sd3.TABLE)),
    Family("Stable Diffusion 1 or 2", ("StableDiffusion",), sgm.original_names),
    Family("Flux.2", ("Flux2",), _rows(flux2.TABLE), (*original.FUSED, *flux2.FUSED)),
    Family("Flux.1", ("Flux",), _rows(flux.TABLE)),
    Family("Qwen-Image", ("QwenImage",), _rows(())),
    Family("Z-Image", ("ZImage",), _rows(z_image.TABLE)),
    Family("Wan", ("Wan",), _rows(wan.TABLE)),
    Family("HunyuanVideo", ("HunyuanVideo", "HunyuanSkyreels"), _rows(hunyuan_video.TABLE)),
    Family("LTX-Video", ("LTX", "LTX2"), _rows(ltx.TABLE)),
)

# What diffusers alone names.
_UNKNOWN = Family("", (), _rows(()))


def family_of_pipeline(pipeline: str) -> Family:
    """The family of a pipeline; one without a name and without a table for pipelines not known here."""
    return next((family for family in FAMILIES if family.has(pipeline)), _UNKNOWN)
