"""Which layers of a model adapters may target, and how a layout describes them: one rule for executor and store.

The only module of `loraplex` that needs torch; nothing in `loraplex` imports it.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from loraplex.layout import Layout, TargetModule

# Families whose text encoders trainers adapt, too; those of the others are large language models that nobody does.
_ADAPTED_TEXT_ENCODERS = ("StableDiffusion", "Flux")
_OTHER_TEXT_ENCODERS = ("Flux2",)
DENOISERS = ("transformer", "transformer_2", "unet")


def adaptable_components(family: str, components: Mapping[str, object]) -> list[str]:
    """The names of the components that adapters may modify: the denoisers, then the family's text encoders."""
    adapts_text = family.startswith(_ADAPTED_TEXT_ENCODERS) and not family.startswith(_OTHER_TEXT_ENCODERS)
    denoisers = [name for name in DENOISERS if components.get(name) is not None]
    encoders = [name for name, one in components.items() if name.startswith("text_encoder") and one is not None]
    return denoisers + (sorted(encoders) if adapts_text else [])


def read_layout(components: Mapping[str, nn.Module], base_model: str, family: str, dtype: str) -> Layout:
    """The layout of a model: every layer of `components` that A and B can attach to, in the model's order."""
    modules = [module for component, model in components.items() for module in target_modules(component, model)]
    return Layout(base_model=base_model, family=family, dtype=dtype, modules=tuple(modules))


def target_modules(component: str, model: nn.Module) -> Iterator[TargetModule]:
    """The layers of one component that A and B can attach to, as a layout describes them."""
    return (_describe(component, name, module) for name, module in target_layers(model))


def target_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of `model` that A and B can attach to, with their dotted paths."""
    return ((name, module) for name, module in model.named_modules() if _is_target(module))


def _is_target(module: nn.Module) -> bool:
    # Subclasses such as NonDynamicallyQuantizableLinear are read by their owners past `forward`, so never targets.
    if type(module) is nn.Linear:
        return True
    return type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"


def _describe(component: str, name: str, module: nn.Module) -> TargetModule:
    if isinstance(module, nn.Linear):
        return TargetModule(component, name, "linear", module.in_features, module.out_features)
    assert isinstance(module, nn.Conv2d)
    height, width = module.kernel_size
    return TargetModule(component, name, "conv2d", module.in_channels, module.out_channels, (height, width))
