"""Every family: jobs equal diffusers and PEFT, alone and in company, and nothing is compiled anew."""

import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from executor.compilation import compiled_graphs
from executor.jobs import Finished
from executor.store_client import PackedAdapter

from ..samples import Watched, choices, fetched, packed
from .conftest import Tiny
from .oracle import Reference, largest_relative_error

pytestmark = [
    pytest.mark.slow,
    # Of diffusers' Euler scheduler with numpy 2, and of inductor for the complex numbers of rotary embeddings.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
]

Adapters = Sequence[tuple[PackedAdapter, float]]
_numbers = itertools.count()


def adapter(tiny: Tiny, seed: int, rank: int = 4) -> PackedAdapter:
    """A random adapter on every second module that diffusers has adapters for, strong enough to be seen."""
    known = set(tiny.model.base.pipeline._lora_loadable_modules)
    modules = [index for index, one in enumerate(tiny.model.layout.modules) if one.component in known]
    return packed(tiny.model.layout, rank, modules[seed % 2 :: 2], seed=seed, scale=0.1)


def started(tiny: Tiny, adapters: Adapters = (), **fields: Any) -> Watched:
    defaults: dict[str, Any] = {"width": 32, "height": 32, "num_inference_steps": 2, "guidance_scale": 3.5}
    defaults["num_frames"] = tiny.model.base.num_frames
    strengths = choices(*(strength for _, strength in adapters))
    watched = Watched(f"{tiny.name}-{next(_numbers)}", adapters=strengths, **{**defaults, **fields})
    tiny.model.base.check(watched.job.parameters)
    tiny.model.engine.submit(watched.job, fetched(*(one for one, _ in adapters)))
    return watched


def outputs(tiny: Tiny, watched: Watched) -> list[torch.Tensor]:
    """What the denoiser gave to a job, when that is finished."""
    outcome = watched.end(120)
    assert isinstance(outcome, Finished), outcome
    assert outcome.recompilations == 0
    return tiny.outputs[watched.job.request_id]


def pictures(watched: Watched) -> list[Image.Image]:
    return [Image.open(io.BytesIO(image.data)) for image in watched.images]


def agrees(tiny: Tiny, watched: Watched, adapters: Adapters = ()) -> float:
    """The largest error of a job's denoiser calls; its pictures are within 1 / 255."""
    ours = outputs(tiny, watched)
    reference = Reference(tiny.folder, tiny.model.layout, adapters)
    expected = reference.generate(watched.job.parameters, tiny.settings.max_sequence_length)
    assert len(pictures(watched)) == len(expected)
    for one, other in zip(pictures(watched), expected, strict=True):
        assert np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max() <= 1
    return largest_relative_error(ours, reference.outputs)


def pair(tiny: Tiny) -> dict[str, Any]:
    """What makes every step a pair, with the prompt and without, in this family."""
    accepts = tiny.model.base.family.accepts
    if "negative_prompt" not in accepts:
        return {}
    return {"negative_prompt": "blue", "true_cfg_scale": 3.0 if "true_cfg_scale" in accepts else 1.0}


def plans(tiny: Tiny) -> list[tuple[Adapters, dict[str, Any]]]:
    a, b = adapter(tiny, 1), adapter(tiny, 2)
    return [
        ([(a, 0.8)], {"seed": 1, "num_inference_steps": 3}),
        ([(b, 1.0), (a, -0.5)], {"seed": 2, "prompt": "a green star on a white background", "num_inference_steps": 4}),
        ([], {"seed": 3, "prompt": "cat", **pair(tiny)}),
        ([(b, 0.7)], {"seed": 4, "num_images": 2, **pair(tiny)}),
    ]


def test_jobs_equal_diffusers_and_peft_in_company_and_alone(tiny: Tiny) -> None:
    graphs = compiled_graphs()
    assert graphs > 0 or tiny.settings.compile == "off"
    together = [started(tiny, adapters, **fields) for adapters, fields in plans(tiny)]
    for watched, (adapters, fields) in zip(together, plans(tiny), strict=True):
        assert agrees(tiny, watched, adapters) < 1e-4
        alone = outputs(tiny, started(tiny, adapters, **fields))
        assert largest_relative_error(alone, tiny.outputs[watched.job.request_id]) < 1e-4
    assert compiled_graphs() == graphs


def test_an_adapter_that_was_evicted_comes_back_the_same(tiny: Tiny) -> None:
    one = adapter(tiny, 1)
    first = outputs(tiny, started(tiny, [(one, 1.0)], seed=5))
    for seed in range(3, 6):
        other = outputs(tiny, started(tiny, [(adapter(tiny, seed), 1.0)], seed=5))
        assert largest_relative_error(other, first) > 1e-3
    assert one.header.digest not in {resident.digest for resident in tiny.model.engine.residents()[0]}
    again = outputs(tiny, started(tiny, [(one, 1.0)], seed=5))
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_strength_zero_is_the_base_bit_for_bit(tiny: Tiny) -> None:
    base = outputs(tiny, started(tiny, seed=6))
    for adapters in ([(adapter(tiny, 1), 0.0)], []):
        again = outputs(tiny, started(tiny, adapters, seed=6))
        assert all(torch.equal(a, b) for a, b in zip(again, base, strict=True))


def test_image_i_is_the_image_of_seed_plus_i(tiny: Tiny) -> None:
    several = started(tiny, seed=40, num_images=3)
    outputs(tiny, several)
    frames = tiny.model.base.num_frames
    for i in range(3):
        single = started(tiny, seed=40 + i)
        outputs(tiny, single)
        for one, other in zip(pictures(single), pictures(several)[i * frames : (i + 1) * frames], strict=True):
            assert np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max() <= 1


@pytest.mark.parametrize("mode", ["image_to_image", "inpaint"])
def test_jobs_that_start_from_an_image_equal_diffusers(tiny: Tiny, mode: str) -> None:
    if mode not in tiny.model.base.modes:
        pytest.skip(f"{tiny.name} has no {mode}")
    one = [(adapter(tiny, 1), 0.8)]
    fields: dict[str, Any] = {"initial_image": Image.effect_noise((32, 32), 90).convert("RGB"), "image_strength": 0.6}
    if mode == "inpaint":
        fields["mask_image"] = Image.linear_gradient("L").resize((32, 32)).point(lambda level: 255 * (level > 127))
    company = started(tiny, num_inference_steps=5, seed=7)
    watched = started(tiny, one, num_inference_steps=5, seed=8, num_images=2, **fields)
    assert agrees(tiny, watched, one) < 1e-4
    outputs(tiny, company)
    assert watched.steps == company.steps - tiny.model.base.skipped_steps(5, 0.6)
