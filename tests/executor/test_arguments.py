"""Arguments inside of mappings, per sample, the same for all, or one for a whole call."""

from typing import Any

import torch

from executor.arguments import Batching, flat, nested


def test_nested_arguments_are_flat_by_dotted_names_and_come_back() -> None:
    arguments: dict[str, Any] = {"a": 1, "more": {"b": 2, "deep": {"c": 3}}, "none": None, "empty": {}}
    assert flat(arguments) == {"a": 1, "more.b": 2, "more.deep.c": 3, "none": None, "empty": {}}
    assert nested(flat(arguments)) == arguments


BATCHING = Batching(frozenset({"x", "more.y"}), same=frozenset({"ids"}), spread=frozenset({"t"}))


def call(samples: int, t: float, first_id: int = 0) -> dict[str, Any]:
    return {
        "x": torch.randn(samples, 3),
        "more": {"y": torch.randn(samples, 2)},
        "ids": (torch.arange(4) + first_id).expand(samples, 4),
        "t": torch.tensor(t),
    }


def test_jobs_at_different_steps_share_a_batch_and_each_sample_has_its_own_step() -> None:
    one, two = BATCHING.prepare(call(1, 900.0)), BATCHING.prepare(call(3, 20.0))
    assert BATCHING.size(two) == 3
    assert BATCHING.key(one) == BATCHING.key(two)
    joined = BATCHING.join([BATCHING.cut(one, 0, 1), BATCHING.cut(two, 1, 3)])
    assert joined["t"].tolist() == [900.0, 20.0, 20.0]
    assert torch.equal(joined["more.y"], torch.cat([one["more.y"], two["more.y"][1:]]))
    assert joined["ids"].shape == (3, 4)
    assert all(value.is_contiguous() for value in joined.values() if isinstance(value, torch.Tensor))


def test_what_the_model_reads_once_for_a_batch_must_be_equal_in_it() -> None:
    square, wide = BATCHING.prepare(call(1, 1.0)), BATCHING.prepare(call(1, 1.0, first_id=7))
    assert BATCHING.key(square) != BATCHING.key(wide)


def test_the_way_to_return_does_not_keep_calls_apart() -> None:
    asked = BATCHING.prepare({**call(1, 1.0), "return_dict": False})
    assert BATCHING.key(asked) == BATCHING.key(BATCHING.prepare(call(1, 1.0)))
