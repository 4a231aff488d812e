"""Many tenants at once: random requests over 50 adapters, some of which fail, are cancelled or come too late.

At the end every image that was answered is the one that the same request draws alone, and everything is where it was.
LORAPLEX_SOAK_REQUESTS sets the length: 120 take about a minute, 2000 a quarter of an hour.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from executor.compilation import compiled_graphs
from loraplex.errors import AdapterNotFound, AdapterRejected, Cancelled, DeadlineExceeded, ServiceError
from loraplex.events import Image, StepDone, Summary
from tests.e2e.pair import Pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = int(os.environ.get("LORAPLEX_SOAK_REQUESTS", "120"))
TENANTS, CLIENTS = 50, 12
# Generous: nobody may wait longer for the start of a job than all that was admitted before it takes.
LONGEST_WAIT_S = 60.0

Pixels = NDArray[np.int16]


@dataclass(frozen=True)
class Request:
    """What one client asks, and what it does meanwhile."""

    adapters: tuple[tuple[str, float], ...]
    prompt: str
    seed: int
    steps: int
    cancel_after: int | None = None
    timeout_s: float | None = None

    def alone(self) -> "Request":
        """The same picture, asked for by a patient client."""
        return Request(self.adapters, self.prompt, self.seed, self.steps)


def write_tenants(folder: Path, count: int) -> list[str]:
    """Adapters of rank 1 to 8 that shift the denoiser's output, each along a direction of its own."""
    generator = torch.Generator().manual_seed(1)
    names = []
    for tenant in range(count):
        rank = 1 + tenant % 8
        modules = {"transformer.proj_out": (128, 32), "transformer.x_embedder": (32, 128)}
        tensors = {}
        for module, (inputs, outputs) in modules.items():
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.2
        names.append(f"tenant-{tenant}")
        save_file(tensors, folder / f"{names[-1]}.safetensors")
    return names


@pytest.fixture(scope="module")
def tenants(pair: Pair) -> list[str]:
    """50 adapters in the store's folder, and one that is refused."""
    save_file({"transformer.proj_out.lora_A.weight": torch.ones(2, 128)}, pair.root / "half.safetensors")
    return write_tenants(pair.root, TENANTS)


def draw(pair: Pair, request: Request) -> Pixels | ServiceError:
    """The image, or the error."""
    with pair.client() as client:
        try:
            events = client.generate(
                request.prompt,
                adapters=dict(request.adapters),
                seed=request.seed,
                num_inference_steps=request.steps,
                timeout_s=request.timeout_s or 300.0,
            )
            with events:
                for event in events:
                    if isinstance(event, StepDone) and event.step == request.cancel_after:
                        return Cancelled("by the test")
                    if isinstance(event, Image):
                        image = np.asarray(event.to_pil().convert("RGB")).astype(np.int16)
                    if isinstance(event, Summary):
                        assert event.recompilations == 0
                        assert event.queue_s < LONGEST_WAIT_S
        except ServiceError as error:
            return error
    return image


def random_requests(names: Sequence[str], count: int, seed: int) -> list[Request]:
    """Adapter k is asked for in proportion to 1 / (k + 1); a few requests of every other kind."""
    chance = random.Random(seed)
    weights = [1 / (k + 1) for k in range(len(names))]
    requests = []
    for number in range(count):
        chosen = set(chance.choices(names, weights, k=chance.choice((0, 1, 1, 1, 2, 3))))
        adapters = [(name, round(chance.uniform(-1, 1.5), 2)) for name in sorted(chosen)]
        if chance.random() < 0.08:
            adapters.append((chance.choice(("half", "nobody-has-this")), 1.0))
        steps = chance.randint(2, 6)
        cancelled = chance.random() < 0.1
        requests.append(
            Request(
                adapters=tuple(adapters),
                prompt=chance.choice(("a red circle", "a green star on a black background", "a cat")),
                seed=chance.randrange(1000) if number % 3 else number % 7,
                steps=steps,
                cancel_after=chance.randint(1, steps - 1) if cancelled else None,
                timeout_s=chance.choice((0.05, 0.3)) if not cancelled and chance.random() < 0.08 else None,
            )
        )
    return requests


def alike(first: Pixels, second: Pixels) -> bool:
    """Within 1/255 everywhere: batches round differently."""
    return bool(np.abs(first - second).max() <= 1)


def job_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("job-")]


def state(pair: Pair) -> tuple[int, int, list[int]]:
    rows = pair.model.arena.rows
    return compiled_graphs(), rows.data_ptr(), [pair.model.table.row_index.data_ptr()]


@pytest.mark.timeout(60 + 5 * REQUESTS)
def test_a_random_soak_leaves_every_image_right_and_everything_as_it_was(pair: Pair, tenants: list[str]) -> None:
    requests = random_requests(tenants, REQUESTS, seed=11)
    before = state(pair)
    chance = random.Random(3)
    delays = [chance.expovariate(1 / 0.05) for _ in requests]  # Poisson arrivals, as far as clients are free

    def ask(numbered: tuple[int, Request]) -> Pixels | ServiceError:
        time.sleep(delays[numbered[0]])
        return draw(pair, numbered[1])

    with ThreadPoolExecutor(CLIENTS) as clients:
        outcomes = list(clients.map(ask, enumerate(requests)))
    for request, outcome in zip(requests, outcomes, strict=True):
        if isinstance(outcome, ServiceError):
            assert isinstance(outcome, _expected_errors(request)), (request, outcome)
    kinds = Counter(type(outcome).__name__ for outcome in outcomes)
    assert kinds["ndarray"] > 0.5 * REQUESTS
    assert {"AdapterNotFound", "AdapterRejected", "Cancelled", "DeadlineExceeded"} <= kinds.keys()
    alone: dict[Request, Pixels] = {}
    for request, outcome in zip(requests, outcomes, strict=True):
        if not isinstance(outcome, ServiceError):
            if request.alone() not in alone:
                reference = draw(pair, request.alone())
                assert not isinstance(reference, ServiceError)
                alone[request.alone()] = reference
            assert alike(outcome, alone[request.alone()]), request
    assert state(pair) == before
    _check_nothing_is_held(pair)


def _expected_errors(request: Request) -> tuple[type[ServiceError], ...]:
    expected: tuple[type[ServiceError], ...] = ()
    if request.cancel_after:
        expected += (Cancelled,)
    if request.timeout_s:
        expected += (DeadlineExceeded,)
    names = dict(request.adapters)
    if "half" in names:
        expected += (AdapterRejected,)
    if "nobody-has-this" in names:
        expected += (AdapterNotFound,)
    return expected


def _check_nothing_is_held(pair: Pair) -> None:
    give_up = time.monotonic() + 10
    while job_threads() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert job_threads() == []
    with pair.client() as client:
        residents = client.residents()
    assert {one.pins for one in residents.adapters} <= {0}
    rows = pair.model.engine._residency.rows
    pair.model.engine.call(rows.check)
    assert sum(one.rank for one in residents.adapters) + residents.free_rows == rows.num_rows - 1
    assert not pair.model.arena.rows[0].any()


def test_every_one_of_fifty_tenants_gets_exactly_its_own_image(pair: Pair, tenants: list[str]) -> None:
    """Known failure 143: the same prompt and seed for all, so that only the adapter tells the images apart."""
    requests = [Request(((name, 1.0),), "a red circle", seed=5, steps=3) for name in tenants]
    alone = [draw(pair, request) for request in requests]
    order = list(range(TENANTS)) * 2
    random.Random(4).shuffle(order)
    with ThreadPoolExecutor(CLIENTS) as clients:
        together = list(clients.map(lambda tenant: draw(pair, requests[tenant]), order))
    references = [one for one in alone if not isinstance(one, ServiceError)]
    assert len(references) == TENANTS
    for tenant, image in zip(order, together, strict=True):
        assert not isinstance(image, ServiceError), image
        matches = [other for other, reference in enumerate(references) if alike(image, reference)]
        assert matches == [tenant]
