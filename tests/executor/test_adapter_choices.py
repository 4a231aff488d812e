"""What the fetched adapters tell about a request."""

import pytest

from executor.adapter_choices import check_rows, check_touched
from executor.jobs import AdapterChoice
from loraplex.errors import InvalidRequest, TooManyRows

from .samples import choices


def test_a_component_that_the_file_does_not_adapt_is_refused() -> None:
    chosen = (AdapterChoice("a", 1.0), AdapterChoice("b", 1.0, components=("transformer", "text_encoder")))
    check_touched(chosen, [{"transformer"}, {"transformer", "text_encoder"}])
    with pytest.raises(InvalidRequest, match="'b' does not adapt text_encoder") as refused:
        check_touched(chosen, [{"transformer"}, {"transformer"}])
    assert (refused.value.field, refused.value.remedy) == ("adapters[1].components", "It adapts transformer.")


def test_an_adapter_of_text_encoders_cannot_begin_after_the_first_step() -> None:
    late = (AdapterChoice("a", 1.0, start=0.5),)
    check_touched(late, [{"transformer", "text_encoder"}])
    with pytest.raises(InvalidRequest) as refused:
        check_touched(late, [{"text_encoder", "text_encoder_2"}])
    assert refused.value.field == "adapters[0].start"
    with pytest.raises(InvalidRequest):
        one = (AdapterChoice("a", 1.0, start=0.5, components=("text_encoder",)),)
        check_touched(one, [{"transformer", "text_encoder"}])


def test_ranks_add_up_over_the_adapters_of_one_step() -> None:
    ranks = {"a": 9, "b": 8}
    with pytest.raises(TooManyRows, match=r"9 \+ 8 = 17"):
        check_rows(choices(1.0, 1.0), ranks, ["a", "b"], rows_per_sample=16, rows=32)
    check_rows(choices(1.0, 1.0), ranks, ["a", "b"], rows_per_sample=17, rows=32)
    apart = (AdapterChoice("a", 1.0, end=0.5), AdapterChoice("b", 1.0, start=0.5))
    check_rows(apart, ranks, ["a", "b"], rows_per_sample=9, rows=32)
    overlapping = (AdapterChoice("a", 1.0, end=0.6), AdapterChoice("b", 1.0, start=0.5))
    with pytest.raises(TooManyRows):
        check_rows(overlapping, ranks, ["a", "b"], rows_per_sample=16, rows=32)


def test_adapters_that_take_turns_must_still_be_resident_together() -> None:
    apart = (AdapterChoice("a", 1.0, end=0.5), AdapterChoice("b", 1.0, start=0.5))
    with pytest.raises(TooManyRows, match="rank rows together"):
        check_rows(apart, {"a": 9, "b": 8}, ["a", "b"], rows_per_sample=16, rows=16)
    again = (AdapterChoice("a", 0.5, end=0.5), AdapterChoice("a", 1.0, start=0.5))
    check_rows(again, {"a": 16}, ["a", "a"], rows_per_sample=16, rows=16)
