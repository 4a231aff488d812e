"""What a caller allowed to leave out: parts of a file by kind, and whole components. Decides by keys; no numbers."""

from dataclasses import dataclass

from adapter_store.dialects.prefixes import ANY, DENOISER, TEXT_ENCODERS, split_prefix
from adapter_store.options import EXACTLY, PackOptions

_DENOISERS = ("transformer", "unet")

# The component of a T5 encoder, by the start of the layout's family; trainers number it as they like.
_T5 = (("Flux", "text_encoder_2"), ("StableDiffusion3", "text_encoder_3"))


@dataclass(frozen=True)
class Waivers:
    """`PackOptions.waived`, to be asked about keys."""

    options: PackOptions = EXACTLY
    family: str = ""

    def kind(self, kind: str) -> bool:
        """Whether what cannot be applied of a kind may be left out; "" never may."""
        return bool(kind) and kind in self.options.waived

    def component_of(self, key: str) -> bool:
        """Whether the component that `key` belongs to, as far as the key tells, may be left out."""
        return bool(self.options.waived) and any(one in self.options.waived for one in self._components(key))

    def _components(self, key: str) -> tuple[str, ...]:
        name = split_prefix(key)
        if name.component == ANY:
            return ()
        if name.component == DENOISER:
            return (self.options.denoiser,) if self.options.denoiser else _DENOISERS
        if name.by_path and "encoder_block" in name.path.replace(".", "_"):
            known = tuple(component for family, component in _T5 if self.family.startswith(family))
            return known or tuple({name.component, *TEXT_ENCODERS[1:]})
        return (name.component,)


NO_WAIVERS = Waivers()
