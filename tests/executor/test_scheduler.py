"""Admission, and which calls share the next batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.scheduler import Admission, Batch, BatchPolicy, PendingCall, Wait
from loraplex.errors import QueueFull


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    admission = Admission(max_queue_length=2)
    assert [admission.admit(job) for job in ("a", "b")] == [0, 1]
    with pytest.raises(QueueFull) as refused:
        admission.admit("c")
    assert (refused.value.retry_after_s or 0) > 0
    assert refused.value.remedy
    assert len(admission) == 2
    admission.leave("a", seconds=2.0)
    assert admission.admit("c") == 1


def test_the_delay_follows_how_long_requests_take() -> None:
    admission = Admission(max_queue_length=1)
    for number in range(50):
        admission.admit(number)
        admission.leave(number, seconds=30.0)
    admission.admit("last")
    with pytest.raises(QueueFull) as refused:
        admission.admit("refused")
    assert refused.value.retry_after_s == pytest.approx(30.0, rel=0.01)


@pytest.fixture
def policy() -> BatchPolicy:
    return BatchPolicy(batch_sizes=(1, 2, 4), wait_s=1.0)


def test_calls_of_one_kind_share_a_batch_and_others_do_not(policy: BatchPolicy) -> None:
    pending = [PendingCall("x", 1, 0.0), PendingCall("y", 1, 0.1), PendingCall("x", 1, 0.2)]
    assert policy.decide(pending, 0, now=0.3) == Batch(((0, 1), (2, 1)))


def test_the_oldest_call_is_never_passed_by_a_fuller_batch(policy: BatchPolicy) -> None:
    pending = [PendingCall("x", 1, 0.0), *(PendingCall("y", 1, 0.1) for _ in range(4))]
    assert policy.decide(pending, 0, now=0.3) == Batch(((0, 1),))


def test_only_compiled_batch_sizes_are_run(policy: BatchPolicy) -> None:
    assert policy.decide([PendingCall("x", 3, 0.0)], 0, now=0.0) == Batch(((0, 2),))
    assert policy.decide([PendingCall("x", 3, 0.0), PendingCall("x", 3, 0.0)], 0, 0.0) == Batch(((0, 3), (1, 1)))


def test_a_call_waits_for_jobs_that_are_about_to_call_again_but_not_for_ever(policy: BatchPolicy) -> None:
    pending = [PendingCall("x", 1, 5.0)]
    assert policy.decide(pending, jobs_between_steps=1, now=5.5) == Wait(6.0)
    assert policy.decide(pending, jobs_between_steps=1, now=6.0) == Batch(((0, 1),))
    assert policy.decide(pending, jobs_between_steps=0, now=5.0) == Batch(((0, 1),))


def test_a_full_batch_does_not_wait(policy: BatchPolicy) -> None:
    assert policy.decide([PendingCall("x", 4, 5.0)], jobs_between_steps=3, now=5.0) == Batch(((0, 4),))


CALLS = st.lists(st.builds(PendingCall, st.sampled_from("xy"), st.integers(1, 9), st.just(0.0)), min_size=1, max_size=6)
SIZES = st.sets(st.integers(2, 8), max_size=3).map(lambda more: tuple(sorted({1, *more})))


@given(CALLS, SIZES)
def test_a_batch_has_a_compiled_size_the_oldest_call_and_one_key(pending: list[PendingCall], sizes: tuple[int]) -> None:
    decision = BatchPolicy(sizes, wait_s=0.0).decide(pending, 0, now=0.0)
    assert isinstance(decision, Batch)
    counts = dict(decision.shares)
    assert sum(counts.values()) in sizes
    assert decision.shares[0][0] == 0
    assert {pending[position].key for position in counts} == {pending[0].key}
    assert all(1 <= count <= pending[position].samples for position, count in counts.items())
