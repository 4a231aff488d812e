"""Target modules as a short text, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.bases.outline import read_outline, write_outline
from loraplex.layout import TargetModule


def linear(name: str, inputs: int = 4, outputs: int = 8) -> TargetModule:
    return TargetModule("transformer", name, "linear", inputs, outputs)


def test_blocks_that_are_alike_are_written_once():
    modules = [linear(f"blocks.{i}.{name}") for i in range(3) for name in ("attn.to_q", "ff")] + [linear("proj_out")]
    text = write_outline(modules)
    assert text == "blocks.{0-2}\n  attn.to_q 4 8\n  ff 4 8\nproj_out 4 8\n"
    assert read_outline(text, "transformer") == modules


def test_a_block_that_differs_and_one_out_of_order_stand_alone():
    modules = [linear("b.0.x"), linear("b.1.x", 5), linear("b.3.x"), linear("b.2.x")]
    assert write_outline(modules) == "b.0\n  x 4 8\nb.1\n  x 5 8\nb.3\n  x 4 8\nb.2\n  x 4 8\n"
    assert read_outline(write_outline(modules), "transformer") == modules


def test_a_convolution_keeps_its_kernel_even_when_it_is_1_x_1():
    modules = [TargetModule("unet", "proj_in", "conv2d", 3, 5), TargetModule("unet", "conv", "conv2d", 3, 5, (3, 1))]
    assert read_outline(write_outline(modules), "unet") == modules


def test_a_name_that_looks_like_a_range_is_a_name():
    modules = [linear("all_x_embedder.2-1"), linear("all_final_layer.2-1.linear"), linear("0-1.x")]
    assert read_outline(write_outline(modules), "transformer") == modules


@pytest.mark.parametrize("name", ["blocks.{0-1}", "a b", " a", "a\nb"])
def test_a_name_that_could_not_be_read_back_is_not_written(name: str):
    with pytest.raises(ValueError, match="cannot hold"):
        write_outline([linear(name), linear("x")])


NAMES = st.lists(
    st.sampled_from(["0", "1", "2", "10", "2-1", "0-3", "a", "to_out", "b-c"]), min_size=1, max_size=4
).map(".".join)
MODULES = st.lists(
    st.builds(linear, NAMES, st.integers(1, 3), st.integers(1, 3)), max_size=12, unique_by=lambda module: module.name
)


def has_no_layer_inside_a_layer(modules: list[TargetModule]) -> bool:
    names = [module.name for module in modules]
    return not any(other.startswith(f"{name}.") for name in names for other in names)


@given(MODULES.filter(has_no_layer_inside_a_layer))
def test_whatever_is_written_is_read_back_in_order(modules: list[TargetModule]):
    assert read_outline(write_outline(modules), "transformer") == modules
