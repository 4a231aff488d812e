"""What a request can ask for beyond a prompt, over real gRPC: images, previews, steps, Cancel, deadlines."""

import asyncio
import io
import threading
import time
from itertools import product
from typing import Any

import pytest
from grpc import aio
from PIL import Image

from executor.config import ExecutorSettings
from executor.service import ExecutorService
from loraplex.channel import CLIENT_OPTIONS, MAX_IMAGE_BYTES
from loraplex.errors import Cancelled, InvalidRequest, QueueFull, TooManyRows
from loraplex.layout import Layout
from loraplex.serving import serving
from loraplex.v1 import executor_pb2 as pb
from loraplex.v1 import executor_pb2_grpc, layout_pb2

from .calls import Stub, events, failure, request, until_free
from .fake_store import FakeStore, StoreServer
from .samples import packed


def png(size: tuple[int, int] = (80, 60), color: str = "orange", mode: str = "RGB") -> bytes:
    target = io.BytesIO()
    Image.new(mode, size, color).save(target, "PNG")
    return target.getvalue()


def of_kind(kind: str, got: list[pb.GenerateResponse]) -> list[Any]:
    return [getattr(event, kind) for event in got if event.WhichOneof("event") == kind]


def with_id(request_id: str) -> tuple[tuple[str, str], ...]:
    return (("x-request-id", request_id),)


async def cancel(stub: Stub, request_id: str) -> bool:
    answer = await stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=10)
    return bool(answer.found)


def module_of(layout: Layout, component: str) -> int:
    return next(index for index, module in enumerate(layout.modules) if module.component == component)


async def test_with_an_initial_image_the_steps_that_are_run_are_counted(service: Stub) -> None:
    asked = request(initial_image=png(), image_strength=0.5, num_inference_steps=10)
    got = await events(service.Generate(asked, timeout=30))
    assert [(one.step, one.num_inference_steps) for one in of_kind("step_done", got)] == [(i + 1, 5) for i in range(5)]
    assert got[-1].summary.steps == 5
    assert len(of_kind("image", got)) == 1


async def test_the_number_of_steps_that_is_told_is_the_one_that_the_pipeline_runs(service: Stub) -> None:
    for num_inference_steps, strength in product((1, 3, 10), (0.1, 0.25, 1 / 3, 0.35, 0.6, 0.999, 1.0)):
        asked = request(initial_image=png(), image_strength=strength, num_inference_steps=num_inference_steps)
        got = await events(service.Generate(asked, timeout=30))
        steps = of_kind("step_done", got)
        assert {one.num_inference_steps for one in steps} == {len(steps)} == {got[-1].summary.steps}


async def test_an_initial_image_and_a_mask_change_what_is_drawn(service: Stub) -> None:
    mask = Image.new("L", (80, 60))
    mask.paste(255, (0, 0, 40, 60))
    target = io.BytesIO()
    mask.save(target, "PNG")
    images = []
    for fields in ({}, {"initial_image": png()}, {"initial_image": png(), "mask_image": target.getvalue()}):
        got = await events(service.Generate(request(seed=1, num_inference_steps=4, **fields), timeout=30))
        images.append(of_kind("image", got)[0].data)
    assert len(set(images)) == 3


async def test_wrong_images_are_named_before_the_request_is_queued_or_anything_fetched(
    service: Stub, store: FakeStore
) -> None:
    wrong: dict[str, list[dict[str, bytes]]] = {
        "initial_image": [{"initial_image": b"no picture"}, {"initial_image": png()[:60]}],
        "mask_image": [
            {"initial_image": png(), "mask_image": b"no picture"},
            {"initial_image": png(), "mask_image": png((60, 80), "white", "L")},
            {"initial_image": png(), "mask_image": png(color="black", mode="L")},
            {"mask_image": png()},
        ],
    }
    for field, cases in wrong.items():
        for fields in cases:
            call = service.Generate(request(("a", 1.0), **fields), timeout=30)
            error = await failure(call)
            assert isinstance(error, InvalidRequest), error
            assert error.field == field
            assert error.remedy
    assert store.requests == []


async def test_an_image_that_is_too_large_is_a_typed_error_and_not_one_of_the_transport(service: Stub) -> None:
    too_large = bytes(MAX_IMAGE_BYTES + 1)
    error = await failure(service.Generate(request(initial_image=too_large), timeout=30))
    assert (type(error), error.field) == (InvalidRequest, "initial_image")
    both = {"initial_image": bytes(MAX_IMAGE_BYTES), "mask_image": too_large}
    error = await failure(service.Generate(request(**both), timeout=30))
    assert (type(error), error.field) == (InvalidRequest, "mask_image")
    error = await failure(service.Generate(request(initial_image=bytes(100 << 20)), timeout=30))  # what gRPC refuses
    assert isinstance(error, InvalidRequest)
    assert (await events(service.Generate(request(), timeout=30)))[-1].HasField("summary")


async def test_the_largest_image_passes(service: Stub) -> None:
    padded = png() + bytes(MAX_IMAGE_BYTES - len(png()))  # decoders stop at the end mark
    got = await events(service.Generate(request(initial_image=padded), timeout=60))
    assert len(of_kind("image", got)) == 1


async def test_previews_come_after_every_so_many_steps_for_every_image(service: Stub) -> None:
    asked = request(num_inference_steps=5, preview_every_steps=2, num_images=2)
    got = await events(service.Generate(asked, timeout=30))
    previews = of_kind("preview", got)
    assert [(one.step, one.index) for one in previews] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    for one in previews:
        picture = Image.open(io.BytesIO(one.data))
        assert (picture.format, max(picture.size) <= 256) == ("JPEG", True)
    assert previews[0].data != previews[1].data


async def test_a_reader_that_stands_still_does_not_hold_up_the_others(service: Stub) -> None:
    standing = service.Generate(request(num_inference_steps=60, preview_every_steps=1, num_images=4), timeout=60)
    await standing.read()
    for _ in range(3):
        assert (await events(service.Generate(request(), timeout=30)))[-1].HasField("summary")
    rest = await events(standing)
    assert len(of_kind("image", rest)) == 4
    assert rest[-1].HasField("summary")


async def test_an_adapter_applies_to_its_steps_and_components(service: Stub, store: FakeStore, layout: Layout) -> None:
    transformer, encoder = module_of(layout, "transformer"), module_of(layout, "text_encoder")
    store.adapters = {"a": packed(layout, 4, sorted((transformer, encoder)), scale=0.3)}

    async def drawn(**fields: Any) -> tuple[bytes, pb.AppliedAdapter]:
        asked = request(seed=3, num_inference_steps=4, output_format=pb.OUTPUT_FORMAT_WEBP)
        asked.adapters.add(ref="a", **fields)
        got = await events(service.Generate(asked, timeout=30))
        picture = Image.open(io.BytesIO(of_kind("image", got)[0].data))
        return picture.tobytes(), got[-1].summary.adapters[0]

    cases: list[dict[str, Any]] = [
        {},
        {"end": 0.5},
        {"start": 0.5},
        {"components": ["transformer"]},
        {"components": ["text_encoder"]},
        {"strength": 0.0},
    ]
    outcomes = [await drawn(**fields) for fields in cases]
    assert len({pixels for pixels, _ in outcomes}) == len(cases)
    assert [applied.modules for _, applied in outcomes] == [2, 2, 2, 1, 1, 2]
    assert (await drawn(components=["transformer", "text_encoder"]))[0] == outcomes[0][0]


async def test_what_an_adapter_does_not_do_is_refused_once_it_is_there(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters = {
        "flow": packed(layout, 9, (module_of(layout, "transformer"),)),
        "text": packed(layout, 2, (module_of(layout, "text_encoder"),)),
    }
    for selection, field in [
        (pb.AdapterSelection(ref="flow", components=["text_encoder"]), "adapters[0].components"),
        (pb.AdapterSelection(ref="text", start=0.4), "adapters[0].start"),
    ]:
        error = await failure(service.Generate(request(adapters=[selection]), timeout=30))
        assert (type(error), error.field) == (InvalidRequest, field)
    taking_turns = [pb.AdapterSelection(ref="flow", end=0.5), pb.AdapterSelection(ref="flow", start=0.5)]
    assert (await events(service.Generate(request(adapters=taking_turns), timeout=30)))[-1].HasField("summary")


async def test_adapters_that_never_fit_the_arena_together_are_refused_and_do_not_wait(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters = {name: packed(layout, 11, (0,), seed=seed) for seed, name in enumerate("abc")}  # 33 of 32 rows
    turns = [
        pb.AdapterSelection(ref=name, start=start, end=start + 0.3)
        for name, start in zip("abc", (0, 0.3, 0.6), strict=True)
    ]
    error = await failure(service.Generate(request(adapters=turns, num_inference_steps=10), timeout=30))
    assert isinstance(error, TooManyRows)


async def test_pack_options_reach_the_store_and_are_part_of_what_is_kept(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters = {"a": packed(layout, 2, (0,))}
    options = layout_pb2.PackOptions(denoiser="transformer", waived=["norm", "bias"], max_rank=4, max_error=0.1)
    plain, fitted = pb.AdapterSelection(ref="a"), pb.AdapterSelection(ref="a", options=options)
    for selection in (plain, fitted, fitted):
        assert (await events(service.Generate(request(adapters=[selection]), timeout=30)))[-1].HasField("summary")
    sent = [one.options for one in store.requests]
    assert [(one.denoiser, sorted(one.waived), one.max_rank, one.max_error) for one in sent] == [
        ("", [], 0, 0.0),
        *[("transformer", ["bias", "norm"], 4, 0.1)] * 2,
    ]
    assert [bool(one.known_digest) for one in store.requests] == [False, False, True]


async def test_cancelling_by_id_ends_a_running_request(service: Stub, store: FakeStore, layout: Layout) -> None:
    store.adapters = {"a": packed(layout, 2, (0,))}
    call = service.Generate(request(("a", 1.0), num_inference_steps=100), metadata=with_id("mine"), timeout=30)
    while (await call.read()).step_done.step < 2:
        pass
    for other in ("min", "mine2", "Mine"):
        assert not await cancel(service, other)
    assert await cancel(service, "mine")
    assert isinstance(await failure(call), Cancelled)
    await until_free(service)
    assert not await cancel(service, "mine")


async def test_cancelling_by_id_ends_all_requests_of_that_id_and_no_other(service: Stub) -> None:
    calls = [
        service.Generate(request(num_inference_steps=60), metadata=with_id(name), timeout=30)
        for name in ("twice", "twice", "other")
    ]
    for call in calls:
        await call.read()
    assert await cancel(service, "twice")
    for call in calls[:2]:
        assert isinstance(await failure(call), Cancelled)
    assert (await events(calls[2]))[-1].HasField("summary")


async def test_cancelling_while_an_adapter_is_fetched_ends_the_request_at_once_and_not_the_fetch(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters, store.held = {"slow": packed(layout, 2, (0,))}, {"slow": threading.Event()}
    mine, other = (service.Generate(request(("slow", 1.0)), metadata=with_id(name), timeout=30) for name in "mo")
    await mine.read(), await other.read()
    began = time.monotonic()
    assert await cancel(service, "m")
    assert isinstance(await failure(mine), Cancelled)
    assert time.monotonic() - began < 2
    assert not store.held["slow"].is_set()
    store.held["slow"].set()
    assert (await events(other))[-1].HasField("summary")
    assert len(store.requests) == 1


async def test_a_deadline_ends_a_request_whose_adapter_is_still_fetched(
    service: Stub, store: FakeStore, layout: Layout
) -> None:
    store.adapters, store.held = {"slow": packed(layout, 2, (0,))}, {"slow": threading.Event()}
    for _ in range(5):  # more than the queue holds
        began = time.monotonic()
        assert (await failure(service.Generate(request(("slow", 1.0)), timeout=0.3))).code == "DEADLINE_EXCEEDED"
        assert time.monotonic() - began < 2
        await asyncio.sleep(0.1)
    store.held["slow"].set()
    assert (await events(service.Generate(request(("slow", 1.0)), timeout=30)))[0].queued.requests_ahead == 0


async def test_a_higher_priority_is_served_first(settings: ExecutorSettings, store_server: StoreServer) -> None:
    own = settings.model_copy(update={"store": store_server.address, "max_running_jobs": 1})
    async with serving(ExecutorService(own), own) as address, aio.insecure_channel(address) as channel:
        stub: Stub = executor_pb2_grpc.ExecutorStub(channel)
        running = stub.Generate(request(num_inference_steps=100), metadata=with_id("running"), timeout=60)
        while (await running.read()).step_done.step < 1:
            pass
        ended: list[str] = []

        async def until_end(name: str, call: Any) -> None:
            assert (await events(call))[-1].HasField("summary")
            ended.append(name)

        waiting = []
        for name in ("NORMAL", "LOW", "UNSPECIFIED", "HIGH"):  # the first is staged, and so before them all
            call = stub.Generate(request(priority=pb.Priority.Value(f"PRIORITY_{name}")), timeout=60)
            await call.read()
            await asyncio.sleep(0.1)
            waiting.append(asyncio.create_task(until_end(name, call)))
        assert await cancel(stub, "running")
        await asyncio.gather(*waiting)
        assert ended == ["NORMAL", "HIGH", "UNSPECIFIED", "LOW"]


async def test_a_cancelled_id_must_be_one(service: Stub) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await cancel(service, "")
    assert refused.value.code().name == "INVALID_ARGUMENT"


async def test_a_full_queue_refuses_before_an_image_is_decoded(service: Stub, store: FakeStore, layout: Layout) -> None:
    store.adapters, store.held = {"slow": packed(layout, 2, (0,))}, {"slow": threading.Event()}
    waiting = [service.Generate(request(("slow", 1.0)), timeout=30) for _ in range(3)]
    for call in waiting:
        await call.read()
    error = await failure(service.Generate(request(initial_image=b"no picture"), timeout=30))
    assert isinstance(error, QueueFull)
    store.held["slow"].set()
    for call in waiting:
        await events(call)


async def test_wrong_numbers_and_enums_of_the_new_fields_are_named(service: Stub, store: FakeStore) -> None:
    wrong = {
        "priority": request(priority=9),
        "preview_every_steps": request(preview_every_steps=4),
        "num_frames": request(num_frames=8),
        "image_strength": request(image_strength=0.5),
        "adapters[0].components": request(adapters=[pb.AdapterSelection(ref="a", components=["vae"])]),
    }
    for field, asked in wrong.items():
        error = await failure(service.Generate(asked, timeout=30))
        assert (type(error), error.field) == (InvalidRequest, field)
    assert store.requests == []


async def test_the_model_tells_its_modes(service: Stub) -> None:
    described = await service.GetModel(pb.GetModelRequest(), timeout=20)
    assert list(described.modes) == [pb.MODE_TEXT_TO_IMAGE, pb.MODE_IMAGE_TO_IMAGE, pb.MODE_INPAINT]
    assert described.max_num_frames == 0


def test_clients_may_send_and_receive_the_largest_messages() -> None:
    assert dict(CLIENT_OPTIONS)["grpc.max_receive_message_length"] > 2 * MAX_IMAGE_BYTES
    assert "grpc.max_send_message_length" not in dict(CLIENT_OPTIONS)  # gRPC's default has no limit
