"""Every tensor is applied, or changes nothing, or was left out as the caller allowed."""

import dataclasses
from pathlib import Path

import pytest
import torch

from adapter_store.accounting import Accounting
from adapter_store.waivers import Waivers
from loraplex.errors import AdapterRejected, InvalidRequest
from loraplex.layout import Layout
from loraplex.pack_options import EXACTLY, PackOptions
from tests.adapter_store.samples import (
    WIDTH,
    Tensors,
    fit_adapter,
    flux_layout,
    kohya,
    numbers,
    paths,
    peft,
    unet_layout,
    write_adapter,
)

TO_Q = "transformer.transformer_blocks.0.attn.to_q"
GOOD = peft(TO_Q, WIDTH, WIDTH, 4)
CLIP = kohya("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", 24, 24, 4, 4)
ONLY_TRANSFORMER = Layout(
    "tiny/flux",
    "FluxPipeline",
    "F32",
    tuple(module for module in flux_layout().modules if module.component == "transformer"),
)


def account(
    folder: Path, tensors: Tensors, waived: tuple[str, ...] = (), layout: Layout | None = None
) -> tuple[Accounting, list[str]]:
    """What becomes of the tensors, and the modules that are adapted."""
    layout = layout or flux_layout()
    path = write_adapter(folder / "a.safetensors", tensors)
    fitted = fit_adapter(path, layout, options=PackOptions(waived=waived))
    return fitted.conversion.accounting, paths(layout, fitted.packed.module_indexes)


def test_a_tensor_without_a_place_and_a_place_without_a_tensor_are_faults():
    assert Accounting.of(["a", "b", "c"], ["a"], ["b"], ["c"]) == Accounting(("a",), ("b",), ("c",))
    for applied in ([], ["a", "x"]):
        with pytest.raises(RuntimeError, match="1 tensors"):
            Accounting.of(["a"], applied, [], [])


def test_an_alpha_that_two_differences_share_is_counted_once():
    assert Accounting.of(["a", "alpha"], ["a", "alpha"], ["alpha"], []) == Accounting(("a", "alpha"), (), ())


def test_without_options_every_tensor_that_is_not_zero_is_applied(tmp_path: Path):
    zeros = {f"{TO_Q}.diff_b": torch.zeros(WIDTH), "transformer.norm_out.norm.diff": torch.zeros(WIDTH)}
    zeros["transformer.transformer_blocks.0.attn.to_k.diff"] = torch.zeros(WIDTH, WIDTH)
    got, modules = account(tmp_path, GOOD | zeros)
    assert set(got.applied) == set(GOOD)
    assert set(got.zero) == set(zeros)
    assert got.waived == ()
    assert modules == [TO_Q]


@pytest.mark.parametrize("part", ["lora_down", "lora_up"])
def test_a_pair_that_adds_nothing_may_belong_to_a_component_that_is_not_served(tmp_path: Path, part: str):
    untrained = {key: tensor * 0 if part in key else tensor for key, tensor in CLIP.items()}
    got, modules = account(tmp_path, GOOD | untrained, layout=ONLY_TRANSFORMER)
    assert (set(got.zero), modules) == (set(CLIP), [TO_Q])


def test_a_pair_of_a_component_that_is_not_served_is_refused_unless_the_component_is_waived(tmp_path: Path):
    """Rows 8, 9 and 10."""
    with pytest.raises(AdapterRejected) as refused:
        account(tmp_path, GOOD | CLIP, layout=ONLY_TRANSFORMER)
    assert refused.value.cause == "COMPONENT_NOT_SERVED"
    got, modules = account(tmp_path, GOOD | CLIP, ("text_encoder",), ONLY_TRANSFORMER)
    assert (set(got.waived), set(got.applied), modules) == (set(CLIP), set(GOOD), [TO_Q])


def test_names_without_a_prefix_are_waived_where_they_lead_to_a_waived_component(tmp_path: Path):
    bare = peft("encoder.layers.0.self_attn.q_proj", 24, 24, 2)
    got, modules = account(tmp_path, GOOD | bare, ("text_encoder",))
    assert (set(got.waived), modules) == (set(bare), [TO_Q])


def test_a_served_component_may_be_waived_as_well_with_whatever_it_holds(tmp_path: Path):
    odd = {"text_encoder.encoder.layers.0.self_attn.q_proj.dora_scale": numbers(1, 24)}
    got, modules = account(tmp_path, GOOD | CLIP | odd, ("text_encoder",))
    assert (set(got.waived), modules) == (set(CLIP) | set(odd), [TO_Q])


T5 = {name: kohya(f"{name}_encoder_block_0_layer_0_SelfAttention_q", 40, 40, 2, 2) for name in ("lora_te2", "lora_te3")}


@pytest.mark.parametrize("name", T5)
def test_t5_is_waived_by_its_component_whatever_number_a_trainer_gives_it(tmp_path: Path, name: str):
    got, _ = account(tmp_path, GOOD | T5[name], ("text_encoder_2",))
    assert set(got.waived) == set(T5[name])
    key = next(iter(T5[name]))
    sd3 = dataclasses.replace(flux_layout(), family="StableDiffusion3Pipeline")
    assert not Waivers(PackOptions(waived=("text_encoder_2",)), sd3).component_of(key)
    assert Waivers(PackOptions(waived=("text_encoder_3",)), sd3).component_of(key)


@pytest.mark.parametrize(
    ("kind", "key", "shape"),
    [
        ("bias", f"{TO_Q}.diff_b", (WIDTH,)),
        ("bias", f"{TO_Q}.lora_B.bias", (WIDTH,)),
        ("norm", "lycoris_norm.w_norm", (4,)),
        ("norm", "lycoris_norm.b_norm", (4,)),
        ("norm", "diffusion_model.blocks.0.norm3.diff", (WIDTH,)),
        ("norm", "transformer.transformer_blocks.0.attn.norm_q.weight", (16,)),
        ("embedding", "bundle_emb.tok.string_to_param.*", (2, 4)),
        ("embedding", "text_encoders.clip_l.transformer.text_model.embeddings.token_embedding.diff", (9, 24)),
        ("embedding", "text_encoder.embeddings.token_embedding.lora_embedding_A", (4, 8)),
    ],
)
def test_what_cannot_be_applied_may_be_waived_by_its_kind_and_by_no_other(
    tmp_path: Path, kind: str, key: str, shape: tuple[int, ...]
):
    got, _ = account(tmp_path, GOOD | {key: numbers(*shape)}, (kind,))
    assert got.waived == (key,)
    others = tuple(other for other in ("bias", "norm", "embedding") if other != kind)
    with pytest.raises(AdapterRejected) as refused:
        account(tmp_path, GOOD | {key: numbers(*shape)}, others)
    assert refused.value.key == key


def test_a_zero_is_zero_even_where_it_may_be_waived(tmp_path: Path):
    got, _ = account(tmp_path, GOOD | {f"{TO_Q}.diff_b": torch.zeros(WIDTH)}, ("bias",))
    assert (got.zero, got.waived) == ((f"{TO_Q}.diff_b",), ())


@pytest.mark.parametrize(
    "key", [f"{TO_Q}.dora_scale", f"{TO_Q}.weight", f"{TO_Q}.a1.weight", "img_in.reshape_weight", "nonsense"]
)
def test_nothing_else_can_be_waived(tmp_path: Path, key: str):
    with pytest.raises(AdapterRejected) as refused:
        account(tmp_path, GOOD | {key: numbers(4, 4)}, ("bias", "norm", "embedding", "text_encoder", "unet"))
    assert refused.value.key == key


def test_a_waiver_that_nothing_needs_changes_nothing(tmp_path: Path):
    assert account(tmp_path, GOOD, ("norm", "text_encoder", "text_encoder_3")) == account(tmp_path, GOOD)


@pytest.mark.parametrize("waived", ["transformer", "unet"])
def test_a_file_of_which_nothing_remains_is_refused(tmp_path: Path, waived: str):
    layout, tensors = (flux_layout(), GOOD) if waived == "transformer" else (unet_layout(), peft("unet.x", 4, 4, 2))
    with pytest.raises(AdapterRejected) as refused:
        account(tmp_path, tensors, (waived,), layout)
    assert refused.value.cause == "NO_TENSORS"


def test_a_dotted_name_of_one_of_two_denoisers_is_waived_only_as_its_own(tmp_path: Path):
    key = "diffusion_model.blocks.0.self_attn.q.lora_A.weight"
    for denoiser, other in (("transformer", "transformer_2"), ("transformer_2", "transformer")):
        assert Waivers(PackOptions(denoiser, (denoiser,))).component_of(key)
        assert not Waivers(PackOptions(denoiser, (other,))).component_of(key)
        assert not Waivers(PackOptions(waived=("transformer",)), unet_layout()).component_of(key)
    assert Waivers(PackOptions(waived=("unet",)), unet_layout()).component_of(key)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("denoiser", "text_encoder"),
        ("waived", ("lora",)),
        ("waived", ("bias", "Norm")),
        ("max_rank", -1),
        ("max_error", -0.1),
        ("max_error", 1.0),
        ("max_error", float("nan")),
        ("max_error", float("inf")),
    ],
)
def test_an_option_of_no_use_is_refused_by_name(field: str, value: object):
    with pytest.raises(InvalidRequest) as refused:
        PackOptions(**{field: value}).checked()  # type: ignore[arg-type]
    assert refused.value.field == f"options.{field}"


def test_the_same_options_have_the_same_text():
    assert str(PackOptions(waived=("norm", "bias", "norm"))) == str(PackOptions(waived=("bias", "norm")))
    assert str(EXACTLY) == str(PackOptions()) == ""
    texts = {str(PackOptions(max_rank=rank, max_error=error)) for rank in (0, 8) for error in (0.0, 0.1)}
    assert len(texts) == 4
