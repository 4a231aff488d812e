"""Every spelling of every module leads to that module, in every family; what could mean two things is refused."""

import time

import pytest

from adapter_store.dialects.names import Names, Share, Target
from adapter_store.dialects.prefixes import split_prefix
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.dialects.bases import BASES, PIPELINES, base, denoiser_modules
from tests.adapter_store.dialects.original_names import ORIGINAL_NAMES

DOTTED = (
    *("diffusion_model.", "model.diffusion_model.", "base_model.model.", "base_model.model.diffusion_model."),
    *("conditional_transformer.", ""),
)
FLAT = ("lora_unet_", "lora_unet__", "lora_transformer_", "lycoris_")
SD_BLOCK = "attentions.0.transformer_blocks.0"
ONE_DENOISER = tuple(name for name in BASES if name != "wan2.2")


def find(layout: Layout, stem: str, denoiser: str = "") -> Target:
    return Names(layout, denoiser).find(split_prefix(stem), stem)


def find_all(layout: Layout, stems: list[str]) -> list[Target]:
    names = Names(layout)
    return [names.find(split_prefix(stem), stem) for stem in stems]


def path(layout: Layout, stem: str, denoiser: str = "") -> str:
    """The one module that `stem` is all of."""
    target = find(layout, stem, denoiser)
    (share,) = target.shares
    module = layout.modules[share.module]
    assert share == Share(share.module, (slice(0, module.out_features),))
    return module.path


def cause(layout: Layout, stem: str, denoiser: str = "") -> tuple[str, str]:
    with pytest.raises(AdapterRejected) as refused:
        find(layout, stem, denoiser)
    assert refused.value.key == stem
    return refused.value.cause, refused.value.message


@pytest.mark.parametrize("name", ONE_DENOISER)
def test_every_module_is_found_by_its_own_name_with_every_prefix(name: str):
    layout = base(name)
    component = layout.modules[0].component
    own = denoiser_modules(name)
    whole = [
        Target(one.out_features, (Share(index, (slice(0, one.out_features),)),))
        for index, one in enumerate(layout.modules)
        if one.component == component
    ]
    for prefix in (*DOTTED, f"{component}.", f"base_model.model.{component}.", f"{component}.{component}."):
        assert find_all(layout, [prefix + module for module in own]) == whole
    for prefix in FLAT:
        assert find_all(layout, [prefix + module.replace(".", "_") for module in own]) == whole


@pytest.mark.parametrize("name", [name for name in ORIGINAL_NAMES if name != "wan2.2"])
def test_every_original_name_means_the_same_with_every_prefix_dotted_and_underscored(name: str):
    layout = base(name)
    originals = ORIGINAL_NAMES[name]()
    plain = find_all(layout, originals)
    for prefix in (*DOTTED, f"{layout.modules[0].component}."):
        assert find_all(layout, [prefix + original for original in originals]) == plain
    for prefix in FLAT:
        assert find_all(layout, [prefix + original.replace(".", "_") for original in originals]) == plain


@pytest.mark.parametrize("name", BASES)
def test_no_name_of_a_family_means_two_modules(name: str):
    """Dotted or not, diffusers' own or original: the whole table, one component after the other."""
    names = Names(base(name))
    for tables in (names._dotted, names._flat):
        assert [path for table in tables.values() for path, target in table.items() if target is None] == []


@pytest.mark.parametrize("name", BASES)
def test_every_text_encoder_module_is_found_by_its_component(name: str):
    layout = base(name)
    modules = [module for module in layout.modules if module.component.startswith("text_encoder")]
    assert [path(layout, module.path) for module in modules] == [module.path for module in modules]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_variants_of_a_pipeline_are_of_its_family(pipeline: str):
    import diffusers

    assert hasattr(diffusers, pipeline)
    plain = {
        "StableDiffusionXL": "sdxl",
        "StableDiffusion3": "sd3",
        "StableDiffusion": "sd1",
        "Flux2": "flux2",
        "Flux": "flux",
        "QwenImage": "qwen-image",
        "ZImage": "z-image",
        "Wan": "wan",
        "HunyuanVideo": "hunyuan-video",
        "LTX": "ltx",
    }
    name = next(name for start, name in plain.items() if pipeline.startswith(start))
    layout = Layout("variant", pipeline, "F32", base(name).modules)
    stems = ORIGINAL_NAMES[name]() if name in ORIGINAL_NAMES else denoiser_modules(name)
    assert find_all(layout, stems) == find_all(base(name), stems)


def test_a_pipeline_of_another_generation_has_diffusers_names_only():
    layout = Layout("next", "HunyuanVideo15Pipeline", "F32", base("hunyuan-video").modules)
    assert (
        path(layout, "diffusion_model.transformer_blocks.0.attn.to_q") == "transformer.transformer_blocks.0.attn.to_q"
    )
    assert cause(layout, "diffusion_model.double_blocks.0.img_attn_proj")[0] == "UNKNOWN_MODULE"


@pytest.mark.parametrize(
    ("name", "alias", "original"),
    [
        ("flux", "double_blocks.1.processor.qkv_lora1", "double_blocks.1.img_attn.qkv"),
        ("flux", "double_blocks.1.processor.qkv_lora2", "double_blocks.1.txt_attn.qkv"),
        ("flux", "double_blocks.1.processor.proj_lora1", "double_blocks.1.img_attn.proj"),
        ("flux", "double_blocks.1.processor.proj_lora2", "double_blocks.1.txt_attn.proj"),
        ("flux", "diffusion_model.single_blocks.1.processor.proj_lora", "single_blocks.1.linear2"),
        ("flux2", "diffusion_model.sformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_q"),
        ("flux2", "sformer_blocks.0.ff_context.linear_out", "double_blocks.0.txt_mlp.2"),
        ("hunyuan-video", "diffusion_model.double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn_qkv"),
        ("hunyuan-video", "diffusion_model.double_blocks.0.txt_mlp.0", "double_blocks.0.txt_mlp.fc1"),
        ("hunyuan-video", "transformer.double_blocks.0.txt_mlp.fc0", "double_blocks.0.txt_mlp.fc1"),
        ("hunyuan-video", "diffusion_model.double_blocks.0.img_mod.lin", "double_blocks.0.img_mod.linear"),
        ("hunyuan-video", "diffusion_model.single_blocks.0.modulation.lin", "single_blocks.0.modulation.linear"),
        ("hunyuan-video", "diffusion_model.time_in.in_layer", "time_in.mlp.0"),
        ("hunyuan-video", "diffusion_model.guidance_in.out_layer", "guidance_in.mlp.2"),
        ("hunyuan-video", "Hunyuan_video_I2V_lora_double_blocks_0_img_attn_qkv", "double_blocks.0.img_attn_qkv"),
        ("hunyuan-video", "lora_unet_single_blocks_1_linear1", "single_blocks.1.linear1"),
        (
            "hunyuan-video",
            "diffusion_model.txt_in.individual_token_refiner.blocks.0.self_attn.qkv",
            "txt_in.individual_token_refiner.blocks.0.self_attn_qkv",
        ),
        ("z-image", "lora_unet__layers_0_attention_out", "layers.0.attention.to_out.0"),
        ("z-image", "layers.1.attention.to.q", "layers.1.attention.to_q"),
        ("wan", "lora_unet__blocks_0_self_attn_q", "blocks.0.attn1.to_q"),
        (
            "sd1",
            f"down_blocks.1.{SD_BLOCK}.attn1.processor.to_out_lora",
            "input_blocks.4.1.transformer_blocks.0.attn1.to_out.0",
        ),
        (
            "sd1",
            f"unet.mid_block.{SD_BLOCK}.attn2.processor.to_k_lora",
            "middle_block.1.transformer_blocks.0.attn2.to_k",
        ),
    ],
)
def test_other_spellings_mean_the_same_module(name: str, alias: str, original: str):
    assert find(base(name), alias) == find(base(name), original)


@pytest.mark.parametrize(
    ("name", "fused", "modules"),
    [
        ("flux", "transformer.double_blocks.0.img_attn.qkv", ("to_q", "to_k", "to_v")),
        ("flux", "transformer.double_blocks.0.txt_attn.qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
        ("sd3", "transformer.joint_blocks.1.x_block.attn.qkv", ("to_q", "to_k", "to_v")),
        ("hunyuan-video", "transformer.double_blocks.0.img_attn_qkv", ("to_q", "to_k", "to_v")),
        ("flux2", "transformer.double_blocks.1.img_attn.qkv", ("to_q", "to_k", "to_v")),
    ],
)
def test_pieces_that_onetrainer_numbers_are_the_modules(name: str, fused: str, modules: tuple[str, ...]):
    found = [path(base(name), f"{fused}.{number}") for number in range(3)]
    block = fused.split(".")[2]
    assert found == [f"transformer.transformer_blocks.{block}.attn.{module}" for module in modules]


@pytest.mark.parametrize("stem", ["diffusion_model.single_blocks.1.linear1.{}", "lora_unet_single_blocks_1_linear1_{}"])
def test_pieces_of_flux2s_fused_projection_start_at_their_rows(stem: str):
    layout = base("flux2")
    whole = find(layout, "single_blocks.1.linear1")
    (share,) = whole.shares
    assert layout.modules[share.module].name == "single_transformer_blocks.1.attn.to_qkv_mlp_proj"
    width = layout.modules[share.module].in_features
    for number, (start, rows) in enumerate([(0, width), (width, width), (2 * width, width), (3 * width, 6 * width)]):
        expected = Target(rows, (Share(share.module, (slice(0, rows),), start),))
        assert find(layout, stem.format(number)) == expected
    assert find(layout, "transformer.single_transformer_blocks.1.attn.to_k") == find(layout, stem.format(1))


def fused_layout() -> Layout:
    """A Flux whose projections were fused, as diffusers' `fuse_qkv_projections` does it."""
    modules: list[TargetModule] = []
    for module in base("flux").modules:
        block, _, layer = module.name.rpartition(".")
        fused = {"to_q": "to_qkv", "add_q_proj": "to_added_qkv"}.get(layer)
        if module.component != "transformer" or layer not in ("to_q", "to_k", "to_v", *ADDED):
            modules.append(module)
        elif fused:
            modules.append(TargetModule("transformer", f"{block}.{fused}", "linear", 32, 96))
    return Layout("tiny/fused", "FluxPipeline", "F32", tuple(modules))


ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")


def test_split_names_find_their_rows_in_a_base_that_fuses_them():
    layout = fused_layout()
    for fused, layers in (("to_qkv", ("to_q", "to_k", "to_v")), ("to_added_qkv", ADDED)):
        index = [module.name for module in layout.modules].index(f"transformer_blocks.0.attn.{fused}")
        for number, layer in enumerate(layers):
            target = find(layout, f"transformer.transformer_blocks.0.attn.{layer}")
            assert target == Target(32, (Share(index, (slice(0, 32),), 32 * number),))


def test_a_fused_name_finds_the_fused_module_whole_and_the_rest_beside_it():
    layout = fused_layout()
    assert path(layout, "lora_unet_double_blocks_0_img_attn_qkv") == "transformer.transformer_blocks.0.attn.to_qkv"
    target = find(layout, "diffusion_model.single_blocks.0.linear1")
    names = [layout.modules[share.module].name.rpartition(".")[2] for share in target.shares]
    assert names == ["to_qkv", "proj_mlp"]
    assert [share.rows for share in target.shares] == [(slice(0, 96),), (slice(96, 224),)]


def test_split_names_find_their_rows_in_comfyuis_z_image():
    modules = tuple(
        TargetModule("transformer", f"layers.0.{name}", "linear", 32, out)
        for name, out in (("attention.qkv", 96), ("attention.out", 32), ("feed_forward.w1", 80))
    )
    layout = Layout("comfy", "ZImagePipeline", "F32", modules)
    found = [find(layout, f"diffusion_model.layers.0.attention.to_{one}").shares[0] for one in "qkv"]
    assert [(share.module, share.start) for share in found] == [(0, 0), (0, 32), (0, 64)]
    assert path(layout, "diffusion_model.layers.0.attention.to_out.0") == "transformer.layers.0.attention.out"


@pytest.mark.parametrize("name", ["flux-dev", "sdxl", "sdxl-refiner", "hunyuan-video"])
def test_the_tables_are_built_in_well_under_50_ms(name: str):
    layout = base(name)
    timings = []
    for _ in range(5):
        started = time.process_time()
        Names(layout)
        timings.append(time.process_time() - started)
    assert min(timings) < 0.03  # the least: others may hold a collection of this process's garbage


def test_an_underscored_name_that_two_modules_share_is_refused():
    modules = (
        TargetModule("transformer", "a_b.c", "linear", 4, 4),
        TargetModule("transformer", "a.b_c", "linear", 4, 4),
    )
    layout = Layout("tiny", "SomePipeline", "F32", modules)
    assert cause(layout, "lora_unet_a_b_c")[0] == "AMBIGUOUS_MODULE"
    assert path(layout, "diffusion_model.a_b.c") == "transformer.a_b.c"


@pytest.mark.parametrize("stem", ["double_blocks.0.img_attn.NOPE", "lora_unet_double_blocks_9_img_attn_proj"])
def test_a_name_of_no_module_is_refused(stem: str):
    assert cause(base("flux"), stem)[0] == "UNKNOWN_MODULE"


def test_an_unknown_prefix_is_refused_with_a_list_of_the_known_ones():
    kind, message = cause(base("flux"), "my_trainer.transformer_blocks.0.attn.to_q")
    assert kind == "UNKNOWN_MODULE"
    for prefix in ("diffusion_model.", "lora_unet_", "base_model.model.", "text_encoders."):
        assert prefix in message


@pytest.mark.parametrize(
    "stem",
    [
        "connectors.audio_connector.transformer_blocks.0.attn1.to_q",
        "diffusion_model.connectors.audio_connector.transformer_blocks.0.attn1.to_q",
        "text_embedding_projection.aggregate_embed",
        "unet.down_blocks.0.attentions.0.proj_in",
    ],
)
def test_a_component_that_the_layout_lacks_is_refused_by_its_name(stem: str):
    kind, message = cause(base("ltx"), stem)
    assert kind == "COMPONENT_NOT_SERVED"
    assert "this layout has transformer, text_encoder" in message
