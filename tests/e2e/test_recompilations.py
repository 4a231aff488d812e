"""200 requests of every kind, in random order, on the compiled model: no graph is added and nothing moves."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from executor.compilation import compiled_graphs
from tests.e2e.pair import Pair
from tests.e2e.test_numbers import NAMES, PROMPT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = 200


@contextmanager
def _recompilation_is_an_error() -> Iterator[None]:
    before = torch._dynamo.config.error_on_recompile
    torch._dynamo.config.error_on_recompile = True
    yield
    torch._dynamo.config.error_on_recompile = before


def _pointers(pair: Pair) -> tuple[int, ...]:
    model = pair.model
    return (model.arena.rows.data_ptr(), model.table.row_index.data_ptr(), model.table.row_strength.data_ptr())


def _base_digest(pair: Pair) -> str:
    digest = hashlib.sha256()
    for model in pair.model.base.components.values():
        for _, weight in sorted(model.state_dict().items()):
            digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _random_request(chance: random.Random) -> dict[str, float]:
    names = chance.sample(NAMES, chance.choice([0, 1, 1, 1, 2]))
    return {name: chance.choice([0.0, 0.3, 0.8, 1.0, -0.5, 1.3]) for name in names}


def test_two_hundred_random_requests_add_no_graph_and_move_nothing(pair: Pair) -> None:
    chance = random.Random(20261130)
    graphs, pointers, weights = compiled_graphs(), _pointers(pair), _base_digest(pair)
    assert graphs > 0, "the model is not compiled"
    with pair.client() as client, _recompilation_is_an_error():
        before = client.generate_image(PROMPT, seed=1, num_inference_steps=2)
        for _ in range(REQUESTS):
            result = client.generate_image(
                PROMPT,
                adapters=_random_request(chance),
                seed=chance.randrange(1000),
                num_inference_steps=chance.choice([1, 2, 3]),
                num_images=chance.choice([1, 1, 2, 3]),
            )
            assert result.summary.recompilations == 0
        after = client.generate_image(PROMPT, seed=1, num_inference_steps=2)
    assert compiled_graphs() == graphs
    assert _pointers(pair) == pointers
    assert _base_digest(pair) == weights
    assert after.image.tobytes() == before.image.tobytes()
