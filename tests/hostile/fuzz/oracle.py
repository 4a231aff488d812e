"""What a file means, recomputed in fp64 from the catalogue of formats. Shares no code with the store.

`dense` is complete: a file with a tensor that it cannot account for, which is not zero, is Wrong.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch

from loraplex.layout import Layout, TargetModule

Tensor = torch.Tensor


class Wrong(Exception):
    """The file should have been refused, for this reason."""


@dataclass
class Dense:
    """The difference of one module, and the same sums of magnitudes, which bound every rounding; both [out, width]."""

    delta: Tensor
    magnitude: Tensor
    largest: float = 0.0
    rank: int = 1
    is_filled: bool = False


def dense(content: bytes, layout: Layout) -> dict[str, Dense]:
    """Module path -> its difference. Raises Wrong."""
    try:
        tensors = safetensors.torch.load(content)
    except Exception as error:
        raise Wrong(f"safetensors refuses the file: {error}") from error
    length = int.from_bytes(content[:8], "little")
    noted = _Noted.of(json.loads(content[8 : 8 + length]).get("__metadata__") or {})
    groups, alphas = _grouped({name: tensor.double() for name, tensor in tensors.items()})
    names = _names(layout)
    result: dict[str, Dense] = {}
    for (stem, algorithm, _), parts in groups.items():
        _add(result, layout, names, noted, stem, algorithm, parts, alphas.get(stem))
    if alphas.keys() - {stem for stem, *_ in groups}:
        raise Wrong("an alpha without factors")
    return result


# pattern, algorithm, part; (?P<p>) names the part, what the pattern captures otherwise tells copies apart.
_SUFFIXES = tuple(
    (re.compile(pattern + "$"), algorithm, part)
    for pattern, algorithm, part in (
        (r"\.(?P<d>lora)_down\.weight", "lora", "A"),
        (r"\.(?P<d>lora)_up\.weight", "lora", "B"),
        (r"\.(?P<d>lora)_mid\.weight", "lora", "mid"),
        (r"\.lora_A\.(?P<d>[^.]+)\.weight", "lora", "A"),
        (r"\.lora_B\.(?P<d>[^.]+)\.weight", "lora", "B"),
        (r"\.lora_A(\.weight)?", "lora", "A"),
        (r"\.lora_B(\.weight)?", "lora", "B"),
        (r"(?P<d>\.lora)(_linear_layer)?\.down\.weight", "lora", "A"),
        (r"(?P<d>\.lora)(_linear_layer)?\.up\.weight", "lora", "B"),
        (r"(?<=_lora)(?P<d>\.)down\.weight", "lora", "A"),
        (r"(?<=_lora)(?P<d>\.)up\.weight", "lora", "B"),
        (r"(?<=_lora[12])(?P<d>\.)down\.weight", "lora", "A"),
        (r"(?<=_lora[12])(?P<d>\.)up\.weight", "lora", "B"),
        (r"\.hada_(?P<p>w[12]_[ab]|t[12])", "loha", ""),
        (r"\.lokr_(?P<p>w[12](_[ab])?|t2)", "lokr", ""),
        (r"\.diff", "full", "diff"),
    )
)
_ALPHA = ".alpha"
Key = tuple[str, str, str]


def _grouped(tensors: Mapping[str, Tensor]) -> tuple[dict[Key, dict[str, Tensor]], dict[str, Tensor]]:
    groups: dict[Key, dict[str, Tensor]] = defaultdict(dict)
    alphas: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_ALPHA):
            alphas[name.removesuffix(_ALPHA)] = tensor
            continue
        if not tensor.isfinite().all():
            raise Wrong(f"{name} is not finite")
        found = next(((s.search(name), a, p) for s, a, p in _SUFFIXES if s.search(name)), None)
        is_of_norm = name.endswith(".diff") and tensor.ndim == 1
        if found is None or is_of_norm:
            if tensor.any():
                raise Wrong(f"{name} is unknown and not zero")
            continue
        match, algorithm, part = found
        assert match is not None
        told = match.groupdict()
        group = groups[name[: match.start()], algorithm, told.get("d") or ""]
        part = part or told["p"]
        if part in group:
            raise Wrong(f"{name} stands twice")
        group[part] = tensor
    return groups, alphas


# -- the algorithms


def _product(algorithm: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, int, bool]:
    """The whole difference [out, in, ...] or flat, the rank that divides alpha, and whether alpha counts at all."""
    try:
        if algorithm == "lora":
            return _lora(**{part.lower(): tensor for part, tensor in parts.items()}), len(parts["A"]), True
        if algorithm == "full":
            return parts["diff"], 1, False
        if algorithm == "loha":
            first, second = (_side(parts, side) for side in "12")
            if first.shape[0] != second.shape[0] or first[0].numel() != second[0].numel():
                raise Wrong("two halves of a LoHa differ in size")
            return (first.flatten(1) * second.flatten(1)).reshape(first.shape), len(parts["w1_b"]), True
        first, second = (parts[f"w{s}"] if f"w{s}" in parts else _side(parts, s) for s in "12")
        kron = torch.kron(first.flatten(1).contiguous(), second.flatten(1).contiguous())
        ranks = [len(parts[name]) for name in ("w1_b", "w2_b") if name in parts]
        return kron, (ranks or [1])[0], bool(ranks)
    except (KeyError, TypeError, RuntimeError, IndexError) as error:
        raise Wrong(f"{algorithm} of {sorted(parts)}: {error!r}") from error


def _lora(a: Tensor, b: Tensor, mid: Tensor | None = None) -> Tensor:
    if mid is not None:
        a = torch.einsum("mnhw,ni->mihw", mid, a.flatten(1))
    return (b.flatten(1) @ a.flatten(1)).reshape(len(b), *a.shape[1:])


def _side(parts: Mapping[str, Tensor], side: str) -> Tensor:
    left, right = parts[f"w{side}_a"], parts[f"w{side}_b"]
    if f"t{side}" in parts:
        return torch.einsum("ijhw,io,jn->onhw", parts[f"t{side}"], left.flatten(1), right.flatten(1))
    return (left.flatten(1) @ right.flatten(1)).reshape(len(left), *right.shape[1:])


_COMPLETE = {
    "lora": ({"A", "B"}, {"A", "B", "mid"}),
    "full": ({"diff"},),
    "loha": ({"w1_a", "w1_b", "w2_a", "w2_b"}, {"w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"}),
    "lokr": tuple(
        one | other
        for one in ({"w1"}, {"w1_a", "w1_b"})
        for other in ({"w2"}, {"w2_a", "w2_b"}, {"w2_a", "w2_b", "t2"})
    ),
}

# -- the names

# The modules that a name stands for, each with the rows of B that it takes, in its own order.
Target = list[tuple[TargetModule, list[slice]]]
_FLAT = re.compile(r"(lora_unet_|lora_transformer_|lycoris_|Hunyuan_video_I2V_lora_|lora_te[123]?_)_*")
_DOTTED = re.compile(
    r"(base_model\.model|model\.diffusion_model|diffusion_model|transformer|unet|text_encoder(_2)?"
    r"|text_encoders\.\w+\.transformer|conditional_transformer)\."
)
_QKV, _ADDED = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_DOUBLE = {
    **{"img_attn.qkv": _QKV, "txt_attn.qkv": _ADDED, "img_attn.proj": ("attn.to_out.0",)},
    **{
        "txt_attn.proj": ("attn.to_add_out",),
        "img_mod.lin": ("norm1.linear",),
        "txt_mod.lin": ("norm1_context.linear",),
    },
    **{"img_mlp.0": ("ff.net.0.proj",), "img_mlp.2": ("ff.net.2",)},
    **{"txt_mlp.0": ("ff_context.net.0.proj",), "txt_mlp.2": ("ff_context.net.2",)},
    **{"processor.qkv_lora1": _QKV, "processor.qkv_lora2": _ADDED},
    **{"processor.proj_lora1": ("attn.to_out.0",), "processor.proj_lora2": ("attn.to_add_out",)},
}
_SINGLE = {
    **{"linear1": (*_QKV, "proj_mlp"), "linear2": ("proj_out",), "modulation.lin": ("norm.linear",)},
    **{"processor.qkv_lora": _QKV, "processor.proj_lora": ("proj_out",)},
}
_OUTSIDE = {
    **{"img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out"},
    **{
        f"{ours}_in.{side}_layer": f"time_text_embed.{theirs}_embedder.linear_{1 + (side == 'out')}"
        for ours, theirs in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance"))
        for side in ("in", "out")
    },
}
_SGM = {
    "input_blocks.1.0.in_layers.2": "down_blocks.0.resnets.0.conv1",
    "input_blocks.1.1.proj_in": "down_blocks.0.attentions.0.proj_in",
    "input_blocks.1.1.transformer_blocks.0.attn1.to_q": "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
}
Names = dict[tuple[str, str], Target]


def _names(layout: Layout) -> Names:
    """(component, dotted name) -> target."""
    names: Names = {}
    by_path = {module.path: module for module in layout.modules}
    for module in layout.modules:
        whole: Target = [(module, [slice(0, module.out_features)])]
        spellings = {module.name}
        if module.component == "text_encoder":
            spellings = {module.name.removeprefix("text_model."), f"text_model.{module.name}"}
        for name in spellings:
            names[module.component, name] = whole
    for name, paths in _original():
        modules = [by_path.get(f"transformer.{path}") for path in paths]
        if all(modules):
            names |= _fused(name, [module for module in modules if module])
    for name, path in _SGM.items():
        if module_ := by_path.get(f"unet.{path}"):
            names["unet", name] = [(module_, [slice(0, module_.out_features)])]
    if last := by_path.get("transformer.norm_out.linear"):
        half = last.out_features // 2
        rows = [slice(half, 2 * half), slice(0, half)]
        names["transformer", "final_layer.adaLN_modulation.1"] = [(last, rows)]
    return names


def _original() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, paths in _DOUBLE.items():
        yield f"double_blocks.0.{name}", tuple(f"transformer_blocks.0.{path}" for path in paths)
    for name, paths in _SINGLE.items():
        yield f"single_blocks.0.{name}", tuple(f"single_transformer_blocks.0.{path}" for path in paths)
    for name, path in _OUTSIDE.items():
        yield name, (path,)


def _fused(name: str, modules: list[TargetModule]) -> Names:
    names: Names = {}
    target: Target = []
    end = 0
    for part, module in enumerate(modules):
        begin, end = end, end + module.out_features
        target.append((module, [slice(begin, end)]))
        if len(modules) > 1:
            names["transformer", f"{name}.{part}"] = [(module, [slice(0, module.out_features)])]
    return names | {("transformer", name): target}


def _find(names: Names, stem: str) -> Target | None:
    if flat := _FLAT.match(stem):
        encoders = flat[1].startswith("lora_te")
        rest = stem[flat.end() :]
        found = [
            target
            for (component, name), target in names.items()
            if component.startswith("text_encoder") == encoders and name.replace(".", "_") == rest
        ]
    else:
        component = ""
        while match := _DOTTED.match(stem):
            if not match[1].startswith("base"):
                component = match[1]
            stem = stem[match.end() :]
        found = [target for (c, name), target in names.items() if name == stem and _means(component, c)]
        denoisers = [target for target in found if not target[0][0].component.startswith("text_encoder")]
        found = denoisers or found
    if len({tuple(id(one[0]) for one in target) for target in found}) > 1:
        raise Wrong(f"{stem} is ambiguous")
    return found[0] if found else None


def _means(said: str, component: str) -> bool:
    if said.startswith("text_encoders"):
        return component.startswith("text_encoder")
    if said.endswith("diffusion_model") or said == "conditional_transformer":
        return not component.startswith("text_encoder")
    return said in ("", component)


# -- alpha


@dataclass
class _Noted:
    """What peft noted in the metadata, by component; "" is for all."""

    fields: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> "_Noted":
        if "lora_adapter_metadata" not in metadata:
            return cls({})
        try:
            whole = json.loads(metadata["lora_adapter_metadata"])
            components = {name.split(".")[0] for name in whole if "." in name}
            below = {
                c: {name.removeprefix(f"{c}."): value for name, value in whole.items() if name.startswith(f"{c}.")}
                for c in components
            }
        except (ValueError, TypeError, AttributeError) as error:
            raise Wrong(f"metadata: {error}") from error
        return cls(below or {"": whole})

    def scaling(self, module: TargetModule, rank: int) -> float | None:
        fields = self.fields.get(module.component) or self.fields.get("") or {}
        if fields.get("r") is not None and not fields.get("rank_pattern") and fields["r"] != rank:
            raise Wrong(f"metadata say rank {fields['r']}, the file has {rank}")
        alpha = fields.get("lora_alpha")
        for pattern, value in (fields.get("alpha_pattern") or {}).items():
            if f".{module.name}".endswith(f".{pattern}"):
                alpha = value
                break
        if alpha is None:
            return None
        if not (math.isfinite(alpha) and alpha > 0):
            raise Wrong(f"metadata say alpha {alpha}")
        return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _scaling(noted: float | None, alpha: Tensor | None, rank: int) -> float:
    if alpha is None:
        return 1.0 if noted is None else noted
    if alpha.numel() != 1 or not math.isfinite(alpha) or alpha <= 0:
        raise Wrong(f"alpha {alpha}")
    scaling = float(alpha) / rank
    if noted is not None and not math.isclose(noted, scaling, rel_tol=6e-3):
        raise Wrong(f"alpha says {scaling}, metadata say {noted}")
    return scaling


# -- all together


def _add(
    result: dict[str, Dense],
    layout: Layout,
    names: Names,
    noted: _Noted,
    stem: str,
    algorithm: str,
    parts: dict[str, Tensor],
    alpha: Tensor | None,
) -> None:
    if parts.keys() not in _COMPLETE[algorithm]:
        raise Wrong(f"{stem} has {sorted(parts)}")
    target = _find(names, stem)
    if target is None:
        if all(tensor.any() for tensor in parts.values()):
            raise Wrong(f"{stem} has no place")
        return
    product, rank, scaled = _product(algorithm, parts)
    bound, *_ = _product(algorithm, {name: tensor.abs() for name, tensor in parts.items()})
    first = target[0][0]
    scaling = _scaling(noted.scaling(first, rank) if algorithm == "lora" else None, alpha, rank) if scaled else 1.0
    _check_shape(stem, product, target)
    for module, rows in target:
        one = result.setdefault(
            module.path,
            Dense(
                torch.zeros(module.out_features, product[0].numel()).double(),
                torch.zeros(module.out_features, product[0].numel()).double(),
            ),
        )
        cut = torch.cat([product.flatten(1)[part] for part in rows]) * scaling
        one.magnitude[:] = torch.cat([bound.flatten(1)[part] for part in rows]) * scaling
        one.largest = max(one.largest, *(float(t.abs().max()) * max(1.0, scaling) for t in parts.values()))
        one.rank = max(one.rank, min(*cut.shape))
        if one.is_filled and (cut - one.delta).abs().max() > 1e-5 * one.magnitude.max():
            raise Wrong(f"{module.path} has two differences")
        one.is_filled = True
        one.delta[:] = cut


def _check_shape(stem: str, product: Tensor, target: Target) -> None:
    module = target[0][0]
    rows = sum(part.stop - part.start for _, parts in target for part in parts)
    if len(product) != rows or product[0].numel() != module.in_features * math.prod(module.kernel):
        raise Wrong(f"{stem} has shape {list(product.shape)}")
    if product.ndim == 4 and tuple(product.shape[1:]) != (module.in_features, *module.kernel):
        raise Wrong(f"{stem} has shape {list(product.shape)}")
