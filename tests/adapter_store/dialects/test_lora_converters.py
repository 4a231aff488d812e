"""Names and rows against diffusers' own LoRA converters, family by family, and where those are wrong.

Every row of a file's B carries its module and its number, so that it can be recognised wherever a converter puts it.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch
from diffusers.loaders import lora_conversion_utils as diffusers_names
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

from adapter_store.dialects.names import Names
from adapter_store.dialects.prefixes import split_prefix
from adapter_store.dialects.suffixes import Suffix, split_suffix
from loraplex.layout import Layout
from tests.adapter_store.dialects import original_names as originals
from tests.adapter_store.dialects.bases import base, denoiser_modules

Tensors = dict[str, torch.Tensor]
Tags = dict[str, torch.Tensor]
RANK = 2


def file_of(layout: Layout, stems: list[str], down: str, up: str, alpha: bool = False) -> Tensors:
    """A LoRA of rank 2 with these stems: A is the stem's number, B its number and the number of the row."""
    names, tensors = Names(layout), {}
    for number, stem in enumerate(stems, start=1):
        out = names.find(split_prefix(stem), stem).out_features
        tensors[stem + down] = torch.full((RANK, 1), float(number))
        rows = number + torch.arange(out, dtype=torch.float64) / (1 << 17)
        tensors[stem + up] = torch.stack([rows, -rows], dim=1)
        if alpha:
            tensors[f"{stem}.alpha"] = torch.tensor(float(RANK))
    return tensors


def by_our_names(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Tags:
    """Module path -> the first column of its B, by our names."""
    names, tags = Names(layout), {}
    for key, tensor in tensors.items():
        suffix = split_suffix(key)
        if isinstance(suffix, Suffix) and suffix.part == "B":
            for share in names.find(split_prefix(suffix.stem), key).shares:
                module = layout.modules[share.module]
                got = tags.setdefault(module.path, torch.zeros(module.out_features, dtype=torch.float64))
                rows = torch.cat([tensor[part, 0] for part in share.rows])
                got[share.start : share.start + len(rows)] = rows
    return tags


def by_diffusers(converted: Mapping[str, torch.Tensor]) -> Tags:
    """The same of a converted file, whose keys are diffusers' own."""
    ends = (".lora_B.weight", ".lora.up.weight", "_lora.up.weight", ".lora_linear_layer.up.weight")
    tags = {}
    for key, tensor in converted.items():
        end = next((end for end in ends if key.endswith(end)), None)
        if end:
            tags[key.removesuffix(end)] = tensor[:, 0]
    return tags


def assert_same(ours: Tags, theirs: Tags) -> None:
    assert set(ours) == set(theirs)
    assert [name for name, tags in ours.items() if not torch.equal(tags, theirs[name])] == []


def flat(prefix: str, names: list[str]) -> list[str]:
    return [prefix + name.replace(".", "_") for name in names]


def dotted(prefix: str, names: list[str]) -> list[str]:
    return [prefix + name for name in names]


KOHYA = (".lora_down.weight", ".lora_up.weight")
PEFT = (".lora_A.weight", ".lora_B.weight")
# What diffusers' converter of kohya's Flux files leaves without its component, or drops.
_OUTSIDE = ("img_in", "txt_in", "time_in", "vector_in", "guidance_in", "final_layer")


def in_flux_blocks() -> list[str]:
    return [name for name in originals.flux_names() if not name.startswith(_OUTSIDE)]


def of_flux2(*left_out: str) -> list[str]:
    return [name for name in originals.flux2_names() if name not in left_out]


def of_hunyuan_video() -> list[str]:
    """Without what is wrong there: the halves of A are swapped too, and A of the refiner's qkv is cut in three."""
    names = originals.hunyuan_video_names()
    return [name for name in names if "final_layer.adaLN" not in name and "self_attn_qkv" not in name]


Stems = Callable[[], list[str]]
Convert = Callable[..., Mapping[str, torch.Tensor]]

# base, stems, suffixes, with alpha, converter
CASES: dict[
    str, tuple[str, Callable[[], list[str]], tuple[str, str], bool, Callable[..., Mapping[str, torch.Tensor]]]
] = {
    "flux, kohya": (
        "flux-kontext",
        lambda: flat("lora_unet_", in_flux_blocks()),
        KOHYA,
        True,
        diffusers_names._convert_kohya_flux_lora_to_diffusers,
    ),
    "flux, fal": (
        "flux-dev",
        lambda: dotted(
            "base_model.model.",
            [n for n in originals.flux_names(19, 38) if not n.startswith(_OUTSIDE) or n == "final_layer.linear"],
        ),
        PEFT,
        False,
        diffusers_names._convert_fal_kontext_lora_to_diffusers,
    ),
    "flux, xlabs": (
        "flux-kontext",
        lambda: [
            *originals.blocks("double_blocks", range(2), ("processor.qkv_lora1", "processor.qkv_lora2")),
            *originals.blocks("double_blocks", range(2), ("processor.proj_lora1", "processor.proj_lora2")),
            *originals.blocks("single_blocks", range(2), ("processor.qkv_lora", "processor.proj_lora")),
        ],
        (".down.weight", ".up.weight"),
        False,
        diffusers_names._convert_xlabs_flux_lora_to_diffusers,
    ),
    "flux, OneTrainer": (
        "flux-kontext",
        lambda: flat("lora_transformer_", [n for n in denoiser_modules("flux-kontext") if ".attn." in n]),
        KOHYA,
        True,
        diffusers_names._convert_kohya_flux_lora_to_diffusers,
    ),
    "flux2, BFL": (
        "flux2",
        lambda: dotted("diffusion_model.", of_flux2("final_layer.adaLN_modulation.1")),
        PEFT,
        False,
        diffusers_names._convert_non_diffusers_flux2_lora_to_diffusers,
    ),
    "flux2, kohya": (
        "flux2",
        lambda: flat(
            "lora_unet_",
            [n for n in of_flux2("final_layer.adaLN_modulation.1") if "modulation" not in n and "guidance" not in n],
        ),
        KOHYA,
        True,
        diffusers_names._convert_kohya_flux2_lora_to_diffusers,
    ),
    "flux2, sformer": (
        "flux2",
        lambda: dotted(
            "diffusion_model.", [n.removeprefix("tran") for n in denoiser_modules("flux2") if n.startswith("tran")]
        ),
        PEFT,
        False,
        diffusers_names._convert_non_diffusers_flux2_lora_to_diffusers,
    ),
    "qwen-image, musubi": (
        "qwen-image",
        lambda: flat("lora_unet_", denoiser_modules("qwen-image")),
        KOHYA,
        True,
        diffusers_names._convert_non_diffusers_qwen_lora_to_diffusers,
    ),
    "z-image, musubi": (
        "z-image",
        lambda: flat("lora_unet_", [n for n in denoiser_modules("z-image") if not n.startswith("all_")]),
        KOHYA,
        True,
        diffusers_names._convert_non_diffusers_z_image_lora_to_diffusers,
    ),
    "z-image, ComfyUI out": (
        "z-image",
        lambda: dotted("diffusion_model.", originals.blocks("layers", range(2), ("attention.out",))),
        KOHYA,
        True,
        diffusers_names._convert_non_diffusers_z_image_lora_to_diffusers,
    ),
    "wan, ComfyUI": (
        "wan-i2v",
        lambda: dotted("diffusion_model.", originals.wan_names(image=True)),
        PEFT,
        False,
        diffusers_names._convert_non_diffusers_wan_lora_to_diffusers,
    ),
    "wan, musubi": (
        "wan-i2v",
        lambda: flat("lora_unet_", [n for n in originals.wan_names(image=True) if n.startswith("blocks")]),
        KOHYA,
        True,
        diffusers_names._convert_musubi_wan_lora_to_diffusers,
    ),
    "hunyuan-video": (
        "hunyuan-video",
        lambda: dotted("diffusion_model.", of_hunyuan_video()),
        PEFT,
        False,
        diffusers_names._convert_hunyuan_video_lora_to_diffusers,
    ),
    "ltx": (
        "ltx",
        lambda: dotted("diffusion_model.", denoiser_modules("ltx")),
        PEFT,
        False,
        diffusers_names._convert_non_diffusers_ltxv_lora_to_diffusers,
    ),
    "ltx2": (
        "ltx2",
        lambda: dotted("diffusion_model.", originals.ltx2_names()),
        PEFT,
        False,
        diffusers_names._convert_non_diffusers_ltx2_lora_to_diffusers,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_names_and_rows_are_those_of_diffusers_converter(case: str):
    base_name, list_stems, (down, up), alpha, convert = CASES[case]
    layout, stems = base(base_name), list_stems()
    tensors = file_of(layout, stems, down, up, alpha)
    ours = by_our_names(layout, tensors)
    theirs = by_diffusers(convert({key: tensor.clone() for key, tensor in tensors.items()}))
    assert_same(ours, theirs)


def convert_sd(tensors: Tensors) -> Tags:
    """Both steps of diffusers' StableDiffusionLoraLoaderMixin, and its names of 2023 as those of the modules."""
    mapped = diffusers_names._maybe_map_sgm_blocks_to_diffusers(dict(tensors), SimpleNamespace(layers_per_block=2))
    converted, _ = diffusers_names._convert_non_diffusers_lora_to_diffusers(mapped)
    tags = {path.replace(".processor", ""): one for path, one in by_diffusers(converted).items()}
    return {f"{path}.0" if path.endswith("to_out") else path: one for path, one in tags.items()}


# From block 10 on diffusers' renaming of sgm names loses its way: `input_blocks_1` is the start of `input_blocks_10`.
@pytest.mark.parametrize(
    ("name", "spelling"),
    [("sdxl", "sgm"), ("sd1", "diffusers"), ("sd2", "diffusers"), ("sdxl", "diffusers"), ("sdxl-refiner", "diffusers")],
)
def test_names_of_unets_are_those_of_diffusers_converter(name: str, spelling: str):
    layout = base(name)
    stems = originals.ORIGINAL_NAMES[name]() if spelling == "sgm" else denoiser_modules(name)
    # Outside the blocks diffusers reads one spelling of each base model only: kohya's of SDXL, its own of SD.
    stems = [stem for stem in stems if not stem.startswith(("time_emb", "add_emb", "label_emb", "out.2", "conv_"))]
    tensors = file_of(layout, flat("lora_unet_", stems), *KOHYA, alpha=True)
    assert_same(by_our_names(layout, tensors), convert_sd(tensors))


def test_names_of_sdxl_outside_the_blocks_are_those_of_diffusers_converter():
    layout = base("sdxl")
    outside = ["time_embed.0", "time_embed.2", "label_emb.0.0", "label_emb.0.2", "input_blocks.0.0", "out.2"]
    tensors = file_of(layout, flat("lora_unet_", outside), *KOHYA)
    assert_same(by_our_names(layout, tensors), convert_sd(tensors))


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_names_of_clip_are_those_of_diffusers_converter(name: str):
    layout = base(name)
    numbers = {"text_encoder": "lora_te1_" if name == "sdxl" else "lora_te_", "text_encoder_2": "lora_te2_"}
    modules = [module for module in layout.modules if module.component in numbers]
    stems = [
        numbers[one.component] + f"text_model.{one.name}".replace("text_model.text_", "text_").replace(".", "_")
        for one in modules
    ]
    tensors = file_of(layout, stems, *KOHYA)
    ours = by_our_names(layout, tensors)
    assert set(ours) == {one.path for one in modules}
    converted, _ = diffusers_names._convert_non_diffusers_lora_to_diffusers(dict(tensors))
    spelled = {
        by_our_names(layout, {key: one}).popitem()[0]: one[:, 0] for key, one in converted.items() if ".up." in key
    }
    assert_same(ours, spelled)


# What diffusers gets wrong, and the proof.


@pytest.mark.parametrize("name", _OUTSIDE)
def test_kohya_flux_modules_outside_the_blocks_are_found_where_diffusers_drops_them(name: str):
    """Its converter writes `x_embedder` and not `transformer.x_embedder`; the load then takes `transformer.` keys only.

    That the module is the right one is shown by the conversion of the base model in test_base_converters.
    """
    layout = base("flux-kontext")
    stems = flat("lora_unet_", [one for one in originals.flux_names() if one.startswith(name)])
    inside = flat(
        "lora_unet_", ["double_blocks.0.img_attn.proj", "double_blocks.1.img_attn.proj", "single_blocks.1.linear2"]
    )
    ours = by_our_names(layout, file_of(layout, stems, *KOHYA, alpha=True))
    theirs = by_diffusers(
        diffusers_names._convert_kohya_flux_lora_to_diffusers(file_of(layout, inside + stems, *KOHYA, alpha=True))
    )
    assert set(ours)
    assert not set(ours) & set(theirs)


def test_the_final_modulation_of_flux2_is_swapped_where_diffusers_forgets_it():
    """Its converter of the base model swaps the halves, as the original has shift first; that of LoRAs does not.

    The model that an adapter was trained on has the original's rows, so B's rows move with those of the weight.
    """
    layout, stem = base("flux2"), "diffusion_model.final_layer.adaLN_modulation.1"
    tensors = file_of(layout, [stem], *PEFT)
    ours = by_our_names(layout, tensors)["transformer.norm_out.linear"]
    theirs = by_diffusers(diffusers_names._convert_non_diffusers_flux2_lora_to_diffusers(dict(tensors)))
    weight = {"final_layer.adaLN_modulation.1.weight": tensors[f"{stem}.lora_B.weight"]}
    of_base = convert_flux2_transformer_checkpoint_to_diffusers(weight)["norm_out.linear.weight"][:, 0]
    assert torch.equal(ours, of_base)
    assert not torch.equal(theirs["transformer.norm_out.linear"], of_base)


def test_the_final_modulation_of_hunyuan_video_swaps_rows_of_b_only():
    """delta = B A with B in two halves of rows: swapping the rows of delta is swapping those of B, and A stays.

    diffusers swaps the halves of A's ranks too, so that B and A no longer fit each other.
    """
    layout, stem = base("hunyuan-video"), "diffusion_model.final_layer.adaLN_modulation.1"
    B, A = torch.randn(6144, 4, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    (share,) = Names(layout).find(split_prefix(stem), stem).shares
    right = torch.cat([(B @ A)[3072:], (B @ A)[:3072]])
    assert layout.modules[share.module].name == "norm_out.linear"
    assert torch.equal(torch.cat([B[part] for part in share.rows]) @ A, right)
    file = {f"{stem}.lora_A.weight": A, f"{stem}.lora_B.weight": B}
    theirs = diffusers_names._convert_hunyuan_video_lora_to_diffusers(file)
    end = "transformer.norm_out.linear.lora_"
    assert not torch.allclose(theirs[f"{end}B.weight"] @ theirs[f"{end}A.weight"], right)


def test_the_refiner_of_hunyuan_video_shares_a_where_diffusers_cuts_it():
    """q, k and v of a fused projection see one input through one A; diffusers gives each a third of its ranks."""
    layout = base("hunyuan-video")
    stem = "diffusion_model.txt_in.individual_token_refiner.blocks.0.self_attn_qkv"
    target = Names(layout).find(split_prefix(stem), stem)
    B = torch.randn(target.out_features, 3, dtype=torch.float64)
    file = {f"{stem}.lora_A.weight": torch.randn(3, 8, dtype=torch.float64), f"{stem}.lora_B.weight": B}
    theirs = diffusers_names._convert_hunyuan_video_lora_to_diffusers(dict(file))
    for share, layer in zip(target.shares, ("to_q", "to_k", "to_v"), strict=True):
        path = f"transformer.context_embedder.token_refiner.refiner_blocks.0.attn.{layer}"
        assert layout.modules[share.module].path == path
        assert torch.equal(torch.cat([B[part] for part in share.rows]), theirs[f"{path}.lora_B.weight"])
        assert len(theirs[f"{path}.lora_A.weight"]) == 1


@pytest.mark.parametrize(
    ("stem", "right"),
    [("diffusion_model.layers.0.attention.qkv", False), ("lora_unet_layers_0_attention_qkv", True)],
)
def test_a_fused_qkv_of_z_image_is_cut_where_diffusers_keeps_its_dotted_name(stem: str, right: bool):
    """The rows of the base model's qkv are q, k and v, as its own converter cuts them."""
    layout = base("z-image")
    tensors = file_of(layout, [stem], *KOHYA)
    ours = by_our_names(layout, tensors)
    assert list(ours) == [f"transformer.layers.0.attention.to_{one}" for one in "qkv"]
    assert torch.equal(torch.cat(list(ours.values())), tensors[f"{stem}.lora_up.weight"][:, 0])
    theirs = by_diffusers(diffusers_names._convert_non_diffusers_z_image_lora_to_diffusers(dict(tensors)))
    if right:
        assert_same(ours, theirs)
    else:
        assert list(theirs) == ["transformer.layers.0.attention.qkv"]
