"""The executor's rpcs over real gRPC on loopback, with the tiny base model and a fake store."""

import asyncio
import io
import json
import threading

import pytest
import torch
from PIL import Image

from loraplex.errors import (
    AdapterNotFound,
    AdapterRejected,
    InvalidRequest,
    QueueFull,
    StoreUnavailable,
    TooManyRows,
)
from loraplex.layout import Layout
from loraplex.v1 import executor_pb2 as pb

from .calls import Stub, events, failure, request, residents, until_free
from .fake_store import FakeStore, StoreServer
from .samples import of_rows, packed


async def test_events_come_in_order_and_the_summary_proves_what_was_done(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters = {"a": packed(layout, 3, (0, 1), scale=0.1), "b": packed(layout, 2, (5,), seed=1, scale=0.1)}
    call = service.Generate(
        request(("b", -0.5), ("a", 1.0), seed=7, num_images=2), metadata=(("x-request-id", "req-1"),), timeout=30
    )
    got = await events(call)
    kinds = [event.WhichOneof("event") for event in got]
    assert kinds == ["queued", *["adapter_ready"] * 2, *["step_done"] * 3, *["image"] * 2, "summary"]
    assert [(event.adapter_ready.ref, event.adapter_ready.rank) for event in got[1:3]] == [("b", 2), ("a", 3)]
    assert [event.step_done.step for event in got[3:6]] == [1, 2, 3]
    image = got[6].image
    assert (image.index, image.seed, image.output_format) == (0, 7, pb.OUTPUT_FORMAT_PNG)
    picture = Image.open(io.BytesIO(image.data))
    assert picture.size == (image.width, image.height) == (64, 64)
    written = json.loads(picture.text["parameters"])  # type: ignore[attr-defined]
    assert (written["seed"], [one["ref"] for one in written["adapters"]]) == (7, ["b", "a"])
    summary = got[-1].summary
    assert (summary.request_id, summary.steps, summary.recompilations) == ("req-1", 3, 0)
    assert [(one.ref, one.strength, one.modules) for one in summary.adapters] == [("b", -0.5, 1), ("a", 1.0, 2)]
    assert store.metadata["x-request-id"] == "req-1"
    ready = [event.adapter_ready.ready_from for event in await events(service.Generate(request(("a", 1.0))))][1]
    assert ready == pb.READY_FROM_ROWS


@pytest.mark.parametrize(("name", "magic"), [("JPEG", "JPEG"), ("WEBP", "WEBP")])
async def test_images_come_in_the_format_that_was_asked_for(service: Stub, name: str, magic: str) -> None:
    wanted = pb.OutputFormat.Value(f"OUTPUT_FORMAT_{name}")
    got = await events(service.Generate(request(output_format=wanted, num_inference_steps=1), timeout=30))
    image = next(event.image for event in got if event.WhichOneof("event") == "image")
    assert image.output_format == wanted
    assert Image.open(io.BytesIO(image.data)).format == magic


async def test_wrong_fields_are_named_and_nothing_is_fetched(service: Stub, store: FakeStore) -> None:
    wrong = {
        "prompt": pb.GenerateRequest(),
        "width": request(width=65),
        "num_images": request(num_images=99),
        "adapters[0].strength": request(("a", float("nan"))),
        "true_cfg_scale": request(negative_prompt="blur"),
    }
    for field, asked in wrong.items():
        error = await failure(service.Generate(asked, timeout=30))
        assert isinstance(error, InvalidRequest)
        assert error.field == field
    assert store.requests == []


async def test_ranks_that_add_up_to_too_much_are_refused(service: Stub, store: FakeStore, layout: Layout) -> None:
    store.adapters = {"a": packed(layout, 9, (0,)), "b": packed(layout, 8, (0,), seed=1)}
    error = await failure(service.Generate(request(("a", 1.0), ("b", 1.0)), timeout=30))
    assert isinstance(error, TooManyRows)
    assert "9 + 8 = 17" in error.message
    assert (await residents(service)).residents == []


async def test_errors_of_the_store_arrive_with_their_reason_and_no_image_is_drawn(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters = {"good": packed(layout, 2, (0,))}
    store.failures["bad"] = AdapterRejected("It holds NaN.", metadata={"cause": "NOT_FINITE", "key": "k"})
    rejected = await failure(service.Generate(request(("good", 1.0), ("bad", 1.0)), timeout=30))
    assert isinstance(rejected, AdapterRejected)
    assert (rejected.cause, rejected.key) == ("NOT_FINITE", "k")
    assert isinstance(await failure(service.Generate(request(("none", 1.0)), timeout=30)), AdapterNotFound)
    assert (await residents(service)).residents == []


async def test_an_error_of_the_store_says_which_adapter_of_the_request_is_wrong(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters = {"good": packed(layout, 2, (0,))}
    store.failures = {
        "nan": AdapterRejected("It holds NaN.", metadata={"cause": "NOT_FINITE"}),
        "none": AdapterNotFound("There is none.", field="ref"),
        "odd": InvalidRequest("No such part.", field="options.waived"),
        "https://h/a.safetensors?signature": AdapterNotFound("There is none.", field="ref"),
        "down": StoreUnavailable("The disk is gone.", retry_after_s=3.0),
    }
    for ref, field in {
        "nan": "adapters[1].ref",
        "none": "adapters[1].ref",
        "odd": "adapters[1].options.waived",
        "https://h/a.safetensors?signature": "adapters[1].ref",
        "down": "",
    }.items():
        error = await failure(service.Generate(request(("good", 1.0), (ref, 1.0)), timeout=30))
        assert (type(error), error.field) == (type(store.failures[ref]), field)
        assert error.metadata["ref"] == ref.removesuffix("?signature")
        assert error.retry_after_s == store.failures[ref].retry_after_s


async def test_requests_that_wait_for_one_wrong_adapter_each_hear_of_their_own_place(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters, store.held = {"good": packed(layout, 2, (0,))}, {"bad": threading.Event()}
    store.failures["bad"] = AdapterRejected("It holds NaN.")
    calls = [service.Generate(request(*adapters), timeout=30) for adapters in ([("bad", 1)], [("good", 1), ("bad", 1)])]
    for call in calls:
        await call.read()
    await asyncio.sleep(0.2)
    store.held["bad"].set()
    assert [(await failure(call)).field for call in calls] == ["adapters[0].ref", "adapters[1].ref"]


async def test_rows_that_do_not_fit_fail_the_request_and_not_the_next(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters = {"wrong": of_rows(layout, torch.ones(2, 7), (0, 1)), "good": packed(layout, 2, (0,))}
    assert (await failure(service.Generate(request(("wrong", 1.0)), timeout=30))).reason == "CORRUPT_ADAPTER"
    assert (await events(service.Generate(request(("good", 1.0)), timeout=30)))[-1].HasField("summary")


async def test_without_a_store_only_requests_without_new_adapters_are_served(
    service: Stub, store: FakeStore, store_server: StoreServer
) -> None:
    store_server.stop()
    assert isinstance(await failure(service.Generate(request(("a", 1.0)), timeout=30)), StoreUnavailable)
    assert (await events(service.Generate(request(), timeout=30)))[-1].HasField("summary")


async def test_a_full_queue_says_when_to_come_back(service: Stub, store: FakeStore, layout: Layout) -> None:
    store.adapters, store.held = {"slow": packed(layout, 2, (0,))}, {"slow": threading.Event()}
    waiting = [service.Generate(request(("slow", 1.0)), timeout=30) for _ in range(3)]
    ahead = [(await call.read()).queued.requests_ahead for call in waiting]
    assert sorted(ahead) == [0, 1, 2]  # calls that are made together arrive in any order
    error = await failure(service.Generate(request(), timeout=30))
    assert isinstance(error, QueueFull)
    assert (error.retry_after_s or 0) > 0
    store.held["slow"].set()
    for call in waiting:
        while not (event := await call.read()).HasField("summary"):
            assert isinstance(event, pb.GenerateResponse)  # the end of the stream would be no event
    assert len(store.requests) == 1
    assert (await events(service.Generate(request(), timeout=30)))[0].queued.requests_ahead == 0


async def test_cancelling_the_stream_ends_the_job_and_frees_its_place(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters = {"a": packed(layout, 2, (0,))}
    for _ in range(5):  # more than the queue holds
        call = service.Generate(request(("a", 1.0), num_inference_steps=100), timeout=30)
        while (await call.read()).step_done.step < 2:
            pass
        call.cancel()
        await until_free(service)
    assert (await events(service.Generate(request(), timeout=30)))[0].queued.requests_ahead == 0


async def test_cancelling_while_fetching_frees_the_place(service: Stub, store: FakeStore, layout: Layout) -> None:
    store.adapters, store.held = {"slow": packed(layout, 2, (0,))}, {"slow": threading.Event()}
    for _ in range(5):
        call = service.Generate(request(("slow", 1.0)), timeout=30)
        await call.read()
        call.cancel()
        await asyncio.sleep(0.05)
    store.held["slow"].set()
    assert (await events(service.Generate(request(("slow", 1.0)), timeout=30)))[0].queued.requests_ahead == 0


async def test_a_deadline_ends_the_job(service: Stub, store: FakeStore, layout: Layout) -> None:
    store.adapters = {"a": packed(layout, 2, (0,))}
    call = service.Generate(request(("a", 1.0), num_inference_steps=100, num_images=4), timeout=0.4)
    assert (await failure(call)).code == "DEADLINE_EXCEEDED"
    await until_free(service)


async def test_the_model_is_described(service: Stub, layout: Layout) -> None:
    described = await service.GetModel(pb.GetModelRequest(), timeout=20)
    assert described.layout_digest == layout.digest
    assert [(one.width, one.height) for one in described.resolutions] == [(64, 64)]
    assert (described.arena_rows, described.rows_per_sample, list(described.batch_sizes)) == (33, 16, [1, 2])
    assert described.device == "cpu"
