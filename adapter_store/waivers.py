"""What a caller allowed to leave out: parts of a file by kind, and whole components. Decides by keys; no numbers."""

from dataclasses import dataclass

from adapter_store.dialects.prefixes import ANY, DENOISER, TEXT_ENCODERS, split_prefix
from loraplex.layout import Layout
from loraplex.pack_options import EXACTLY, PackOptions

_DENOISERS = ("transformer", "unet")

# The component of a T5 encoder, by the start of the layout's family; trainers number it as they like.
_T5 = (("Flux", "text_encoder_2"), ("StableDiffusion3", "text_encoder_3"))


@dataclass(frozen=True)
class Waivers:
    """`PackOptions.waived`, to be asked about keys; without a layout as far as a file alone tells."""

    options: PackOptions = EXACTLY
    layout: Layout | None = None

    def kind(self, kind: str) -> bool:
        """Whether what cannot be applied of a kind may be left out; "" never may."""
        return bool(kind) and kind in self.options.waived

    def component_of(self, key: str) -> bool:
        """Whether the component that `key` belongs to may be left out. A key that names none is for the layout."""
        if not self.options.waived:
            return False
        name = split_prefix(key)
        if name.component == ANY:
            return False
        if name.component == DENOISER:
            return all(one in self.options.waived for one in self._denoisers())
        if name.by_path and "encoder_block" in name.path.replace(".", "_"):
            return any(one in self.options.waived for one in self._t5(name.component))
        return name.component in self.options.waived

    def _denoisers(self) -> tuple[str, ...]:
        """What a key that only says "the denoiser" may be about."""
        if self.options.denoiser:
            return (self.options.denoiser,)
        served = dict.fromkeys(module.component for module in self.layout.modules) if self.layout else _DENOISERS
        return tuple(one for one in served if one not in TEXT_ENCODERS) or _DENOISERS

    def _t5(self, named: str) -> tuple[str, ...]:
        family = self.layout.family if self.layout else ""
        known = tuple(component for start, component in _T5 if family.startswith(start))
        return known or (named, *TEXT_ENCODERS[1:])


NO_WAIVERS = Waivers()
