"""Step 4: groups in any trainer's naming -> the layout's modules.

Decides from the header alone which rows of which difference go where; no numbers are read, except to compare two groups
that claim the same rows, and to see whether what the layout has no place for is zero. What it returns is complete:
every tensor of the file is accounted for.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from adapter_store.accounting import Accounting
from adapter_store.bases import known_layouts
from adapter_store.dialects.names import Names, Target
from adapter_store.dialects.prefixes import split_prefix
from adapter_store.dialects.recognise import describe_family
from adapter_store.dialects.suffixes import Algorithm
from adapter_store.errors import Cause, rejected
from adapter_store.groups import FileGroups, Group, is_zero
from adapter_store.placing import Piece, Placed, are_equal
from adapter_store.scaling import PeftConfig, scaling_of, scaling_of_whole
from adapter_store.validate import RawFile
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from loraplex.pack_options import EXACTLY, PackOptions

# The layers of denoisers that take the latents: an adapter that needs a wider one was made for another model.
_INPUT_LAYERS = ("x_embedder", "conv_in", "img_in", "proj_in", "patch_embedding", "pos_embed.proj")


@dataclass(frozen=True)
class Conversion:
    """A file fitted to a layout: the modules in the layout's order, and what became of every tensor."""

    placed: tuple[Placed, ...]
    accounting: Accounting


def convert(
    file: RawFile,
    found: FileGroups,
    layout: Layout,
    configs: dict[str, PeftConfig],
    options: PackOptions = EXACTLY,
) -> Conversion:
    """Place every group. Raises AdapterRejected."""
    names = Names(layout, options.denoiser)
    pieces: dict[int, list[Piece]] = defaultdict(list)
    applied: list[str] = []
    zero, waived = list(found.zero), list(found.waived)
    for group in found.groups:
        target = _target(file, group, found, names)
        if target is None:
            zero.extend(group.keys)
        elif layout.modules[target.shares[0].module].component in options.waived:
            waived.extend(group.keys)
        else:
            applied.extend(group.keys)
            for index, piece in _pieces(file, group, target, layout, configs):
                pieces[index].append(piece)
    for config in configs.values():
        config.check_patterns_used()
    if not pieces:
        raise rejected(Cause.NO_TENSORS, "The file holds no difference of any module that is to be applied.")
    modules = tuple(
        Placed(index, layout.modules[index], _disjoint(file, layout.modules[index], pieces[index]))
        for index in sorted(pieces)
    )
    return Conversion(modules, Accounting.of(file.tensors, applied, zero, waived))


def _target(file: RawFile, group: Group, found: FileGroups, names: Names) -> Target | None:
    """Where `group` belongs; None when it is zero and its component is not served."""
    try:
        return names.find(split_prefix(group.stem), group.key)
    except AdapterRejected as error:
        if error.cause == Cause.COMPONENT_NOT_SERVED and is_zero(file, group):
            return None
        if error.cause == Cause.AMBIGUOUS_COMPONENT:
            raise
        family = describe_family([other.stem for other in found.groups], known_layouts(), names.layout)
        raise rejected(Cause(error.cause), f"{error.message} {family}".rstrip(), error.key) from None


def _pieces(
    file: RawFile, group: Group, target: Target, layout: Layout, configs: dict[str, PeftConfig]
) -> list[tuple[int, Piece]]:
    """The pieces of `group` with the indexes of their modules."""
    modules = [layout.modules[share.module] for share in target.shares]
    _check_shapes(file, group, target, modules[0])
    scaling = _scaling(group, modules, configs)
    fused = len(modules) > 1
    return [(share.module, Piece(group, share.rows, share.start, scaling, fused)) for share in target.shares]


def _scaling(group: Group, modules: list[TargetModule], configs: dict[str, PeftConfig]) -> float:
    name = split_prefix(group.stem)
    config = configs.get(modules[0].component) or configs.get("")
    if config and not config.is_about(group.algorithm, group.key):
        config = None
    path = name.path if name.flat or len(modules) > 1 else modules[0].name
    if not group.sizes.scaled:
        return scaling_of_whole(group.alpha_key, path, group.alpha, config)
    return scaling_of(group.alpha_key, path, group.sizes.rank, group.alpha, config)


def _check_shapes(file: RawFile, group: Group, target: Target, module: TargetModule) -> None:
    sizes = group.sizes
    if not sizes.fits(module):
        if module.name in _INPUT_LAYERS and sizes.out == target.out_features and not sizes.flat:
            message = f"{group.key[:200]!r} is for {sizes.inner[0]} inputs, {module.path} has {module.in_features}."
            raise rejected(
                Cause.CONTROL_LORA, f"{message} It is a control LoRA, and needs another base model.", group.key
            )
        raise rejected(Cause.SHAPE_MISMATCH, _shape_message(file, group, target, module), group.key)
    if sizes.out != target.out_features:
        raise rejected(Cause.SHAPE_MISMATCH, _shape_message(file, group, target, module), group.out_key)


def _shape_message(file: RawFile, group: Group, target: Target, module: TargetModule) -> str:
    sizes = group.sizes
    needed = [module.in_features, *(module.kernel if module.kernel != (1, 1) else ())]
    key, shape, expected = group.key, [sizes.out, *sizes.inner], [target.out_features, *needed]
    if group.label == Algorithm.LORA.value:
        key, expected = (
            (group.out_key, [target.out_features, sizes.rank])
            if sizes.fits(module)
            else (
                group.key,
                [sizes.rank, *needed],
            )
        )
        shape = list(file.tensors[key].shape)
    what = "has" if shape == list(file.tensors[key].shape) else "is part of a difference of"
    message = f"{key[:200]!r} {what} shape {shape}, {module.path} needs {expected}."
    if shape == expected[::-1] and shape != expected:
        return f"{message} The matrix is transposed."
    return f"{message} The adapter was trained for a base model with other widths."


def _disjoint(file: RawFile, module: TargetModule, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The pieces of a module in the order of their rows; equal copies count once. Raises DUPLICATE_MODULE."""
    kept: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if not kept or piece.start >= kept[-1].stop:
            kept.append(piece)
            continue
        last = kept[-1]
        if (last.start, last.stop) != (piece.start, piece.stop) or not are_equal(file, last, piece):
            message = f"{piece.group.key[:200]!r} and {last.group.key[:200]!r} adapt {module.path} differently."
            raise rejected(Cause.DUPLICATE_MODULE, message, piece.group.key)
        kept[-1] = min(last, piece, key=lambda one: (one.group.sizes.exact_rank, one.group.key))
    return tuple(kept)
