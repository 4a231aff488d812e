"""Admission, and which calls share the next batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.scheduler import Admission, Batch, BatchPolicy, PendingCall, StartQueue, StepTimes, Wait
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
    assert policy.decide([PendingCall("x", 3, 0.0), PendingCall("x", 3, 0.0)], 0, 0.0) == Batch(((0, 2),))


def test_a_call_that_fits_is_not_torn_apart(policy: BatchPolicy) -> None:
    pending = [PendingCall("x", 1, 0.0), PendingCall("x", 2, 0.0), PendingCall("x", 2, 0.0), PendingCall("x", 1, 0.0)]
    assert policy.decide(pending, 0, now=0.0) == Batch(((0, 1), (1, 2), (3, 1)))
    assert policy.decide(pending[:2], 0, now=0.0) == Batch(((0, 1),))


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


def everything(job: object) -> bool:
    return True


def test_jobs_start_in_the_order_of_their_arrival() -> None:
    waiting = StartQueue[str]()
    for arrived, job in enumerate("abc"):
        waiting.add(job, arrived)
    assert [waiting.next(everything) for _ in range(4)] == ["a", "b", "c", None]


def test_priority_is_a_head_start_and_no_more() -> None:
    waiting = StartQueue[str](head_start_s=10)
    waiting.add("low, long ago", 0, priority=-1)
    waiting.add("normal", 5)
    waiting.add("high", 11, priority=1)
    waiting.add("high, later", 21, priority=1)
    assert [waiting.next(everything) for _ in range(4)] == ["high", "normal", "low, long ago", "high, later"]


def test_a_job_that_does_not_fit_is_passed_a_few_times_and_then_all_wait_for_it() -> None:
    waiting = StartQueue[str](max_passes=2)
    for arrived, job in enumerate(["large", "a", "b", "c"]):
        waiting.add(job, arrived)
    small = lambda job: job != "large"  # noqa: E731
    assert [waiting.next(small) for _ in range(3)] == ["a", "b", None]
    assert waiting.next(everything) == "large"
    assert waiting.next(small) == "c"


def test_a_job_that_left_is_not_started() -> None:
    waiting = StartQueue[str]()
    waiting.add("a", 0)
    waiting.add("b", 1)
    waiting.remove("a")
    assert list(waiting) == ["b"]


ARRIVALS = st.lists(st.tuples(st.floats(0, 100), st.integers(-1, 1), st.booleans()), min_size=1, max_size=40)


@given(ARRIVALS, st.integers(0, 5), st.data())
def test_no_job_waits_longer_than_its_bound(
    arrivals: list[tuple[float, int, bool]], max_passes: int, data: st.DataObject
) -> None:
    """Random arrivals; a job that is `large` fits only now and then, but always when it is asked often enough."""
    head_start_s = 10.0
    waiting = StartQueue[int](head_start_s, max_passes)
    coming = sorted(range(len(arrivals)), key=lambda job: arrivals[job][0])
    turn = {job: arrived - priority * head_start_s for job, (arrived, priority, _) in enumerate(arrivals)}
    started: list[int] = []
    began: dict[int, int] = {}  # how many had started when a job arrived
    refused_in_a_row = 0
    while coming or len(waiting):
        if coming and (not len(waiting) or data.draw(st.booleans())):
            job = coming.pop(0)
            waiting.add(job, arrivals[job][0], arrivals[job][1])
            began[job] = len(started)
            continue
        # What runs ends after a while, so that whatever waits fits at last.
        room = refused_in_a_row >= 3 or data.draw(st.booleans())
        chosen = waiting.next(lambda job, room=room: room or not arrivals[job][2])  # type: ignore[misc]
        refused_in_a_row = 0 if chosen is not None else refused_in_a_row + 1
        if chosen is not None:
            started.append(chosen)
    assert sorted(started) == list(range(len(arrivals)))
    for position, job in enumerate(started):
        passed_by = [other for other in started[began[job] : position] if turn[other] > turn[job]]
        assert len(passed_by) <= max_passes


def test_steps_are_bounded_by_the_shortest_ever_seen() -> None:
    times = StepTimes()
    assert times.at_least("64x64", steps=10) == 0.0
    for seconds in (0.5, 0.2, 0.4):
        times.observe("64x64", seconds)
    times.observe("128x128", 3.0)
    assert times.at_least("64x64", steps=10) == pytest.approx(2.0)
