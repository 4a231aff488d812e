"""Calls that are handed over, cut, joined, run and delivered; and the queue that they wait in."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from executor.arguments import Batching
from executor.calls import CallQueue
from executor.denoiser import Method, ModelCall, intercept, run_batch
from executor.engine import Run
from executor.scheduler import BatchPolicy
from loraplex.errors import Cancelled, InternalError

from .samples import Watched

BATCHED = Batching(frozenset({"x", "t"}))


def double(x: torch.Tensor, t: torch.Tensor, **others: Any) -> tuple[torch.Tensor]:
    return (x * 2 + t[:, None],)


def call(samples: int = 1, *, method: Method | None = None, **others: Any) -> ModelCall:
    arguments = {"x": torch.randn(samples, 3), "t": torch.arange(samples, dtype=torch.float32), **others}
    return ModelCall(Run(Watched().job, ()), method or Method("transformer", double, BATCHED), arguments)


class _Model(nn.Module):
    def forward(self, x: int, y: int = 2, **more: int) -> int:
        return x + y + sum(more.values())


def test_an_intercepted_call_arrives_by_name_however_it_was_written() -> None:
    model = _Model()
    method = Method("m", model.forward, Batching(frozenset({"x"})))
    intercept(model, "forward", method, lambda method, arguments: arguments)
    assert model(1) == {"x": 1}
    assert model(1, 5, z=7) == model(y=5, x=1, z=7) == {"x": 1, "y": 5, "z": 7}
    assert method.function(**model(1, 5, z=7)) == 13
    with pytest.raises(TypeError):
        model()


def test_a_batch_of_several_calls_gives_each_what_it_would_get_alone() -> None:
    calls = [call(1), call(2), call(3)]
    run_batch([(calls[0], 1), (calls[1], 2), (calls[2], 1)])
    run_batch([(calls[2], 2)])
    for one in calls:
        assert torch.equal(one.result.result(timeout=0)[0], double(**one.arguments)[0])


def test_a_call_is_done_only_when_all_its_samples_are() -> None:
    one = call(3)
    run_batch([(one, 2)])
    assert (one.result.done(), one.samples_left) == (False, 1)
    run_batch([(one, 1)])
    assert one.result.done()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({}, {}, True),
        ({"ids": torch.zeros(4, 3)}, {"ids": torch.zeros(4, 3)}, True),
        ({"ids": torch.zeros(4, 3)}, {"ids": torch.ones(4, 3)}, False),
        ({"ids": torch.zeros(4, 3)}, {"ids": torch.zeros(4, 3, dtype=torch.bfloat16)}, False),
        ({"ids": torch.zeros(4, 3)}, {"ids": torch.zeros(3, 4)}, False),
        ({"scale": torch.tensor(1.0)}, {"scale": torch.tensor(1.0)}, True),
        ({"scale": torch.tensor(1.0)}, {"scale": torch.tensor(2.0)}, False),
        ({"kwargs": {"scale": 1.0}}, {"kwargs": {"scale": 1.0}}, True),
        ({"kwargs": {"scale": 1.0}}, {"kwargs": {"scale": 0.5}}, False),
        ({"guidance": None}, {"guidance": None}, True),
        ({"guidance": None}, {}, False),
        ({"x": torch.zeros(2, 3)}, {"x": torch.zeros(5, 3), "t": torch.zeros(5)}, True),
        ({"x": torch.zeros(1, 3)}, {"x": torch.zeros(1, 4)}, False),
        ({"x": torch.zeros(1, 3)}, {"x": torch.zeros(1, 3, dtype=torch.float64)}, False),
        ({"residuals": {1}}, {"residuals": {1}}, False),  # cannot be compared, so never shared
    ],
)
def test_calls_share_a_batch_only_if_all_that_is_not_batched_is_equal(
    first: dict[str, Any], second: dict[str, Any], same: bool
) -> None:
    assert (call(**first).key == call(**second).key) is same


def queue_of(
    *calls: ModelCall, sizes: tuple[int, ...] = (1, 2), between_steps: int = 0, wait_s: float = 0.0
) -> CallQueue:
    waiting = CallQueue(BatchPolicy(sizes, wait_s), lambda: between_steps)
    for one in calls:
        waiting.add(one)
    return waiting


SOLO = Method("text_encoder", lambda **_: 1)


def test_an_empty_queue_is_idle_for_ever() -> None:
    waiting = queue_of()
    assert waiting.idle_seconds() is None
    assert waiting.take_solo() is None
    assert waiting.take_batch() == ()


def test_a_call_that_runs_alone_goes_first() -> None:
    denoiser, encoder = call(), call(method=SOLO)
    waiting = queue_of(denoiser, encoder)
    assert waiting.idle_seconds() == 0.0
    assert waiting.take_solo() is encoder
    assert waiting.take_batch() == [(denoiser, 1)]


def test_a_call_that_waits_for_company_says_for_how_long() -> None:
    waiting = queue_of(call(), between_steps=1, wait_s=60.0)
    assert waiting.take_batch() == ()
    assert 50 < (waiting.idle_seconds() or 0) <= 60


def test_calls_of_jobs_that_are_over_fail_and_leave() -> None:
    ended, other = call(), call()
    waiting = queue_of(ended, other)
    ended.run.job.cancel()
    waiting.drop(lambda run: run.job.over())
    assert isinstance(ended.result.exception(timeout=0), Cancelled)
    assert waiting.take_batch() == [(other, 1)]


def test_failing_all_fails_every_call_and_spares_those_that_are_done() -> None:
    done, denoiser, solo = call(), call(), call(method=SOLO)
    waiting = queue_of(done, denoiser, solo)
    run_batch([(done, 1)])
    waiting.fail_all(InternalError("broken"))
    assert done.result.exception(timeout=0) is None
    assert isinstance(denoiser.result.exception(timeout=0), InternalError)
    assert isinstance(solo.result.exception(timeout=0), InternalError)
    assert waiting.idle_seconds() is None


def test_arrival_is_when_the_call_was_made() -> None:
    before = time.monotonic()
    assert before <= call().arrived <= time.monotonic()


def test_a_method_that_runs_alone_may_hide_the_names_of_its_arguments() -> None:
    class Decoder(nn.Module):
        def decode(self, *args: object, **kwargs: object) -> tuple[object, ...]:  # as diffusers 0.41 wraps it
            return (*args, kwargs)

    model = Decoder()
    method = Method("vae", model.decode)
    intercept(model, "decode", method, lambda method, arguments: method.function(**arguments))
    assert model.decode(1, return_dict=False) == (1, {"return_dict": False})
