"""The retries of examples/backend.py, against a client that fails as told."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from examples.backend import draw, is_worth_a_retry
from loraplex.errors import AdapterRejected, QueueFull, ServiceError, StorageExhausted, StoreUnavailable


class FailingClient:
    """Raises its errors one after the other from `generate`, and keeps what it was asked with."""

    def __init__(self, errors: Sequence[ServiceError]) -> None:
        self.errors = list(errors)
        self.asked: list[dict[str, Any]] = []

    def generate(self, prompt: str, **options: Any) -> Any:
        """Fail."""
        self.asked.append({"prompt": prompt, **options})
        raise self.errors.pop(0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (QueueFull("full", retry_after_s=0.5), True),
        (StoreUnavailable("away"), True),
        (StorageExhausted("full"), False),
        (AdapterRejected("no"), False),
    ],
)
def test_worth_a_retry_is_what_says_when_or_was_not_there(error: ServiceError, expected: bool):
    assert is_worth_a_retry(error) is expected


def test_every_attempt_has_the_same_seed_and_id_and_less_time(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(pauses), sleep=pauses.append)
    monkeypatch.setattr("examples.backend.time", clock)
    client = FailingClient([QueueFull("full", retry_after_s=2.0), StoreUnavailable("away"), AdapterRejected("no")])
    with pytest.raises(AdapterRejected):
        draw(client, "a cat", {}, request_id="mine", within_s=60)  # type: ignore[arg-type]
    assert 2.0 <= pauses[0] <= 3.0
    assert 0.4 <= pauses[1] <= 0.6
    assert len({(one["seed"], one["request_id"]) for one in client.asked}) == 1
    assert [one["timeout_s"] for one in client.asked] == pytest.approx([60.0, 60 - pauses[0], 60 - sum(pauses)])


def test_a_pause_beyond_the_deadline_is_not_waited_for():
    client = FailingClient([QueueFull("full", retry_after_s=60.0)])
    with pytest.raises(QueueFull):
        draw(client, "a cat", {}, request_id="mine", within_s=1.0)  # type: ignore[arg-type]
    assert len(client.asked) == 1
