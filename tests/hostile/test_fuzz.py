"""The fuzzer in the ordinary run: a few thousand files, or LORAPLEX_FUZZ_CASES of them; `make fuzz` for many."""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.adapter_store.samples import pack_file
from tests.hostile.fuzz.drive import MAX_CPU_SECONDS, MAX_GROWTH_BYTES, PACKED, judge, run
from tests.hostile.fuzz.mutations import mutate
from tests.hostile.fuzz.seeds import FLUX, pair, seeds

CASES = int(os.environ.get("LORAPLEX_FUZZ_CASES", "2500"))
STEM = "lora_unet_double_blocks_0_img_attn_qkv"


@pytest.mark.timeout(0 if CASES > 10_000 else 300)
def test_every_mutated_file_is_packed_to_the_right_bytes_or_refused(tmp_path: Path):
    tally = run(CASES, seed=1, folder=tmp_path)
    assert tally.failures == []
    assert tally.slowest_cpu_s < MAX_CPU_SECONDS
    assert tally.growth_bytes < MAX_GROWTH_BYTES
    assert 0.05 < tally.outcomes[PACKED] / tally.cases < 0.5  # neither side may starve
    assert len(tally.outcomes) > 20


def test_a_case_is_the_same_files_every_time():
    good = seeds()
    first, second = ([mutate(random.Random(f"1 {n}"), good[n % 9], good) for n in range(50)] for _ in range(2))
    assert first == second


def test_the_oracle_tells_wrong_numbers_and_tensors_that_were_left_out(tmp_path: Path):
    """What the store packs of one file is held against another one."""
    tensors = pair(STEM, 24, 8, 3, 1.5)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    kept[f"{STEM}.lora_up.weight"][5, 1] *= 1 + 1e-5
    other = {"transformer.proj_out.lora_A.weight": kept[f"{STEM}.lora_down.weight"]}
    other["transformer.proj_out.lora_B.weight"] = kept[f"{STEM}.lora_up.weight"][:4].clone()

    path = tmp_path / "a.safetensors"
    path.write_bytes(save(tensors))
    packed = pack_file(path, FLUX)
    assert judge(packed, save(tensors)) == PACKED
    assert judge(packed, save(kept)).startswith("numbers: transformer.transformer_blocks.0.attn.to_q")
    assert judge(packed, save(tensors | other)).startswith("numbers: transformer.proj_out")
    assert judge(packed, save({"transformer.proj_out.diff": torch.ones(4, 8)})).startswith("invented")
    assert judge(packed, save(tensors | {f"{STEM}.dora_scale": torch.ones(1, 8)})).startswith("accepted")
