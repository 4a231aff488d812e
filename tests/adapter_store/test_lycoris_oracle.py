"""Adapters that the LyCORIS package itself wrote: the packed rows do what its modules do in their forward pass.

The forward pass is what was trained. LyCORIS 4.1.3's `get_diff_weight`, which merges, multiplies LoHa and LoKr by
alpha / rank once more: `test_the_forward_pass_of_lycoris_and_its_merge_disagree` keeps the proof.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lycoris.modules.full import FullModule
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from torch import nn

from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule
from tests.adapter_store.samples import Float64, Tensors, pack_tensors

INPUTS, OUTPUTS = 24, 36
STEM = "lycoris_block_layer"
PATH = "unet.block.layer"

SHARED = ({"alpha": 2}, {"alpha": 2, "rs_lora": True}, {"alpha": 3, "use_scalar": True}, {"alpha": 0})
LOKR = (
    {"factor": 4},  # w2 in factors
    {"factor": 4, "lora_dim": 100},  # both whole
    {"factor": 12, "lora_dim": 1, "decompose_both": True},
    {"factor": 6, "unbalanced_factorization": True},
    {"factor": -1, "full_matrix": True},
)
CASES: list[tuple[type, dict[str, Any]]] = [
    *((module, options) for module in (LoConModule, LohaModule) for options in SHARED),
    *((LokrModule, shared | options) for shared in SHARED for options in LOKR),
    (FullModule, {}),
]


def layer(kernel: int) -> tuple[nn.Module, TargetModule]:
    if not kernel:
        return nn.Linear(INPUTS, OUTPUTS, bias=False), TargetModule("unet", "block.layer", "linear", INPUTS, OUTPUTS)
    size = (kernel, kernel)
    conv = nn.Conv2d(INPUTS, OUTPUTS, size, padding=kernel // 2, bias=False)
    return conv, TargetModule("unet", "block.layer", "conv2d", INPUTS, OUTPUTS, size)


def adapt(base: nn.Module, module: type, options: dict[str, Any]) -> nn.Module:
    """A module of LyCORIS around `base`, with random numbers for all that is trained."""
    torch.manual_seed(0)
    adapted = module(STEM, base, **{"lora_dim": 4} | options).double().eval()
    for parameter in adapted.parameters():
        nn.init.normal_(parameter)
    return adapted


def saved(adapted: Any) -> Tensors:
    return {f"{STEM}.{name}": tensor.detach().float() for name, tensor in adapted.custom_state_dict().items()}


def difference(base: nn.Module, adapted: nn.Module, kernel: int) -> Float64:
    """What the module adds to the output, for inputs that show one weight each."""
    size = max(kernel, 1)
    width = INPUTS * size * size
    with torch.no_grad():
        if not kernel:
            return (adapted(torch.eye(INPUTS).double()) - base(torch.eye(INPUTS).double())).T.numpy()
        pixels = torch.eye(width).double().reshape(width, INPUTS, size, size)
        middle = size // 2
        return (adapted(pixels) - base(pixels))[:, :, middle, middle].T.numpy()


@pytest.mark.parametrize("use_tucker", [False, True])
@pytest.mark.parametrize("kernel", [0, 1, 3])
@pytest.mark.parametrize(("module", "options"), CASES)
def test_rows_are_what_lycoris_computes(
    tmp_path: Path, module: type, options: dict[str, Any], kernel: int, use_tucker: bool
):
    """Rows 17, 54, 58, 103 and 104 of the known failures, against the trainer."""
    base, target = layer(kernel)
    base.double()
    adapted = adapt(base, module, options | {"use_tucker": use_tucker})
    expected = difference(base, adapted, kernel)
    if module is FullModule:  # it saves what it added to the weight that it took over
        adapted.apply_to()
    got = pack_tensors(tmp_path, Layout("tiny", "Other", "F32", (target,)), saved(adapted), max_rank=36)[PATH]
    if getattr(adapted, "use_w1", False) and adapted.use_w2:
        # With rs_lora it trains whole factors at sqrt(rank), which no file tells: LyCORIS too reads them back at 1.
        expected /= adapted.scale
    # The file holds float32 of the module's float64, so each of up to three factors is rounded before anything here.
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("module", [LohaModule, LokrModule])
def test_the_forward_pass_of_lycoris_and_its_merge_disagree(module: type):
    base, _ = layer(0)
    adapted = adapt(base.double(), module, {"alpha": 2, "factor": 4})
    trained, merged = difference(base, adapted, 0), adapted.get_diff_weight()[0].detach().numpy()
    assert np.allclose(merged, trained * 2 / 4)


def test_dora_of_lycoris_is_refused_by_name(tmp_path: Path):
    """Rows 99, 101, 102 and 108: no DoRA is applied as something else."""
    for module in (LoConModule, LohaModule, LokrModule):
        base, target = layer(0)
        tensors = saved(adapt(base, module, {"alpha": 2, "weight_decompose": True}))
        with pytest.raises(AdapterRejected, match="DoRA") as refused:
            pack_tensors(tmp_path, Layout("tiny", "Other", "F32", (target,)), tensors)
        assert refused.value.key == f"{STEM}.dora_scale"
