"""The client against fakes of both services."""

import gc
import subprocess
import sys
import time

import pytest

from loraplex import AdapterReady, AdapterSelection, Client, Image, Queued, StepDone, Summary
from loraplex.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    ServiceUnavailable,
)
from loraplex.v1 import executor_pb2

from .conftest import FakeExecutor, FakeStore


def test_a_generation_is_a_stream_of_typed_events(client: Client):
    events = list(client.generate("a cat", adapters={"sketch": 0.5}, seed=7))
    assert [type(event) for event in events] == [Queued, AdapterReady, StepDone, StepDone, Image, Summary]
    queued, ready, step, _, image, summary = events
    assert queued == Queued(requests_ahead=2)
    assert isinstance(ready, AdapterReady)
    assert (ready.ref, ready.rank, ready.ready_from, ready.fetch_s, ready.load_s) == ("sketch", 4, "store", 1.5, 0.0)
    assert step == StepDone(step=1, num_inference_steps=2)
    assert isinstance(image, Image)
    assert (image.output_format, image.seed, image.to_pil().size) == ("png", 7, (8, 4))
    assert isinstance(summary, Summary)
    assert (summary.adapters[0].strength, summary.total_s) == (0.5, 2.5)


def test_a_generation_can_be_waited_for(client: Client):
    result = client.generate_image("a cat", adapters="sketch", num_images=2, seed=7)
    assert result.image.size == (8, 4)
    assert [image.seed for image in result.encoded] == [7, 8]
    assert len(result.images) == 2
    assert result.adapters[0].ref == result.summary.adapters[0].ref == "sketch"


@pytest.mark.parametrize(
    "adapters",
    [
        {"a": 0.5, "b": 1.0},
        [("a", 0.5), "b"],
        [AdapterSelection("a", 0.5), AdapterSelection("b")],
        iter([("a", 0.5), ("b", 1)]),
    ],
)
def test_adapters_can_be_written_in_several_ways(client: Client, executor: FakeExecutor, adapters):
    client.generate_image("a cat", adapters=adapters)
    assert [(a.ref, a.strength) for a in executor.request.adapters] == [("a", 0.5), ("b", 1.0)]


def test_options_that_are_left_out_are_left_to_the_executor(client: Client, executor: FakeExecutor):
    client.generate_image("a cat")
    assert [field.name for field, _ in executor.request.ListFields()] == ["prompt", "output_format"]


def test_every_option_reaches_the_executor(client: Client, executor: FakeExecutor):
    client.generate_image(
        "a cat",
        negative_prompt="a dog",
        seed=0,
        width=8,
        height=4,
        num_inference_steps=2,
        guidance_scale=0.0,
        true_cfg_scale=2.0,
        num_images=1,
        output_format="webp",
    )
    expected = executor_pb2.GenerateRequest(
        prompt="a cat",
        negative_prompt="a dog",
        seed=0,
        width=8,
        height=4,
        num_inference_steps=2,
        guidance_scale=0.0,
        true_cfg_scale=2.0,
        num_images=1,
        output_format=executor_pb2.OUTPUT_FORMAT_WEBP,
    )
    assert executor.request == expected


def test_an_unknown_keyword_is_refused(client: Client):
    with pytest.raises(TypeError, match="sed"):
        client.generate("a cat", sed=7)  # type: ignore[call-arg]


@pytest.mark.parametrize("wrong", [{"seed": 1 << 70}, {"width": 8.5}, {"output_format": "gif"}, {"request_id": "a\tb"}])
def test_a_value_that_fits_no_request_names_its_field(client: Client, wrong):
    with pytest.raises(InvalidRequest) as refused:
        client.generate("a cat", **wrong)
    assert refused.value.field == next(iter(wrong))


def test_the_request_id_travels_and_is_made_up_when_none_is_given(client: Client, executor: FakeExecutor):
    assert client.generate_image("a cat", request_id="my-id").summary.request_id == "my-id"
    assert len(client.generate_image("a cat").summary.request_id) == 32


def test_an_error_arrives_as_the_class_that_the_service_raised(client: Client, executor: FakeExecutor):
    executor.failure = AdapterNotFound("There is no adapter 'x'.", remedy="Look at `loraplex adapters`.")
    events = client.generate("a cat", adapters=["x"])
    assert isinstance(next(events), Queued)
    with pytest.raises(AdapterNotFound, match="no adapter 'x'") as raised:
        next(events)
    assert raised.value.remedy == "Look at `loraplex adapters`."
    assert list(events) == []


def test_a_full_queue_says_when_to_come_back(client: Client, executor: FakeExecutor):
    executor.failure = QueueFull("Full.", retry_after_s=1.5)
    with pytest.raises(QueueFull) as raised:
        client.generate_image("a cat")
    assert raised.value.retry_after_s == 1.5


def test_an_absent_service_is_named(nobody: str):
    with Client(executor=nobody) as client, pytest.raises(ServiceUnavailable, match=nobody):
        client.model()


def test_a_timeout_is_an_error_of_its_own(client: Client, executor: FakeExecutor):
    executor.hold = True
    with pytest.raises(DeadlineExceeded):
        client.generate_image("a cat", timeout_s=0.2)
    assert executor.ended.wait(10)


def test_closing_a_generation_cancels_the_call(client: Client, executor: FakeExecutor):
    executor.hold = True
    events = client.generate("a cat")
    next(events)
    events.close()
    assert executor.ended.wait(10)
    assert list(events) == []


def test_leaving_the_with_of_a_generation_cancels_the_call(client: Client, executor: FakeExecutor):
    executor.hold = True
    with client.generate("a cat") as events:
        next(events)
    assert executor.ended.wait(10)


def test_dropping_a_generation_cancels_the_call(client: Client, executor: FakeExecutor):
    executor.hold = True
    next(client.generate("a cat"))
    gc.collect()
    assert executor.ended.wait(10)


def test_a_stream_without_an_image_is_an_error(client: Client, executor: FakeExecutor):
    executor.hold = True
    executor.ended.set()
    with pytest.raises(InternalError):
        client.generate_image("a cat")


def test_the_model_and_its_residents_are_described(client: Client):
    model = client.model()
    assert (model.base_model, model.resolutions, len(model.layout.modules)) == ("tiny", ((8, 4),), 1)
    residents = client.residents()
    assert (residents.free_rows, residents.adapters[0].rank, residents.adapters[0].last_used) == (12, 4, None)


def test_adapters_are_listed_over_all_pages(client: Client):
    assert [adapter.ref for adapter in client.adapters()] == ["neon", "sketch", "sunset"]


def test_an_inspection_without_a_layout_says_nothing_about_applying(client: Client):
    inspection = client.inspect("sketch")
    assert (inspection.applicable, inspection.rejection, inspection.modules[0].alpha) == (None, None, 8.0)


def test_an_inspection_for_a_layout_says_why_not(client: Client):
    inspection = client.inspect("sketch", layout_digest="a" * 64)
    assert inspection.applicable is False
    assert inspection.rejection is not None
    assert inspection.rejection.cause == "NOT_FINITE"


def test_a_prefetch_is_for_the_executors_layout(client: Client, store: FakeStore):
    stages = [(report.stage, report.rank) for report in client.prefetch("sketch")]
    assert stages == [("downloading", 0), ("ready", 4)]
    assert store.layout_digests == ["a" * 64]


def test_addresses_come_from_arguments_then_environment_then_defaults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAPLEX_EXECUTOR", "from-env:1")
    monkeypatch.delenv("LORAPLEX_STORE", raising=False)
    with Client() as client:
        assert (client.executor, client.store) == ("from-env:1", "127.0.0.1:50051")
    with Client(executor="argument:2") as client:
        assert client.executor == "argument:2"


def test_the_client_brings_neither_torch_nor_what_only_services_need():
    code = "import sys, loraplex, loraplex.cli; print(*sys.modules, sep='\\n')"
    began = time.monotonic()
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"torch", "diffusers", "transformers", "numpy", "safetensors", "pydantic", "structlog", "prometheus_client"}
    assert heavy.isdisjoint(loaded)
    assert time.monotonic() - began < 20
