"""Whether a job is over."""

import time

from executor.jobs import Job, StepDone
from loraplex.errors import Cancelled, DeadlineExceeded

from .samples import parameters


def test_a_job_is_over_when_it_is_cancelled() -> None:
    job = Job("id", parameters(), None, lambda event: None)
    assert job.over() is None
    job.cancel()
    assert isinstance(job.over(), Cancelled)


def test_a_job_is_over_when_its_deadline_has_passed() -> None:
    assert Job("id", parameters(), time.monotonic() + 60, lambda event: None).over() is None
    assert isinstance(Job("id", parameters(), time.monotonic() - 1, lambda event: None).over(), DeadlineExceeded)


def test_events_go_to_the_listener() -> None:
    events: list[object] = []
    Job("id", parameters(), None, events.append).emit(StepDone(1))
    assert events == [StepDone(1)]


def test_its_repr_is_one_line_without_the_prompt() -> None:
    job = Job("id", parameters(prompt="secret\nprompt"), None, lambda event: None)
    assert "secret" not in repr(job)
    assert "\n" not in repr(job)
