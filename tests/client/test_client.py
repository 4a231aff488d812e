"""The client against fakes of both services."""

import dataclasses
import gc
import io
import subprocess
import sys
import time
from pathlib import Path

import PIL.Image
import pytest

from loraplex import AdapterReady, AdapterSelection, Client, Image, PackOptions, Preview, Queued, StepDone, Summary
from loraplex.channel import MAX_IMAGE_BYTES
from loraplex.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    ServiceUnavailable,
)
from loraplex.options import GenerateOptions
from loraplex.v1 import executor_pb2, layout_pb2

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
        num_frames=1,
        initial_image=b"a file",
        mask_image=b"another",
        image_strength=0.5,
        preview_every_steps=2,
        priority="high",
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
        num_frames=1,
        initial_image=b"a file",
        mask_image=b"another",
        image_strength=0.5,
        preview_every_steps=2,
        priority=executor_pb2.PRIORITY_HIGH,
    )
    assert executor.request == expected


def test_every_field_of_the_wire_has_an_option(client: Client):
    fields = {field.name for field in executor_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert fields == {"prompt"} | (GenerateOptions.__annotations__.keys() - {"timeout_s", "request_id"})
    fields = {field.name for field in executor_pb2.AdapterSelection.DESCRIPTOR.fields}
    assert fields == {field.name for field in dataclasses.fields(AdapterSelection)}
    fields = {field.name for field in layout_pb2.PackOptions.DESCRIPTOR.fields}
    assert fields == {field.name for field in dataclasses.fields(PackOptions)}


def test_everything_about_an_adapter_reaches_the_executor(client: Client, executor: FakeExecutor):
    options = PackOptions(denoiser="transformer_2", waived=("norm", "bias"), max_rank=8, max_error=0.1)
    selection = AdapterSelection("a", 0.5, 0.25, 0.75, ("transformer", "text_encoder"), options)
    client.generate_image("a cat", adapters=[selection])
    assert executor.request.adapters[0] == executor_pb2.AdapterSelection(
        ref="a",
        strength=0.5,
        start=0.25,
        end=0.75,
        components=["transformer", "text_encoder"],
        options=layout_pb2.PackOptions(denoiser="transformer_2", waived=["bias", "norm"], max_rank=8, max_error=0.1),
    )


def test_an_adapter_of_wrong_types_names_its_field(client: Client):
    with pytest.raises(InvalidRequest) as refused:
        client.generate("a cat", adapters=[AdapterSelection("a", "much")])  # type: ignore[arg-type]
    assert refused.value.field == "adapters"
    with pytest.raises(TypeError, match="tuple of names"):
        PackOptions(waived="bias")  # type: ignore[arg-type]


def test_an_image_may_be_a_pil_image_a_path_or_bytes(client: Client, executor: FakeExecutor, tmp_path: Path):
    image = PIL.Image.effect_noise((9, 7), 60).convert("RGB")
    path = tmp_path / "cat.png"
    image.save(path)
    for given in (image, path, str(path), path.read_bytes()):
        client.generate_image("a cat", initial_image=given)
        sent = PIL.Image.open(io.BytesIO(executor.request.initial_image))
        assert sent.tobytes() == image.tobytes()
    client.generate_image("a cat", initial_image=path, mask_image=PIL.Image.new("L", (9, 7), 255))
    assert PIL.Image.open(io.BytesIO(executor.request.mask_image)).mode == "L"


def test_a_photo_is_sent_upright(client: Client, executor: FakeExecutor, tmp_path: Path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.new("RGB", (40, 20)).save(tmp_path / "photo.jpg", exif=exif)
    with PIL.Image.open(tmp_path / "photo.jpg") as photo:
        client.generate_image("a cat", initial_image=photo)
    assert PIL.Image.open(io.BytesIO(executor.request.initial_image)).size == (20, 40)


@pytest.mark.parametrize("field", ["initial_image", "mask_image"])
@pytest.mark.parametrize(
    "given",
    [b"", bytes(MAX_IMAGE_BYTES + 1), "no-such-file.png", 7, PIL.Image.new("F", (4, 4))],
    ids=["nothing", "too large", "no file", "no image", "no mode of PNG"],
)
def test_an_image_that_cannot_be_sent_names_its_field(client: Client, field: str, given):
    with pytest.raises(InvalidRequest) as refused:
        client.generate("a cat", **{field: given})
    assert refused.value.field == field
    assert refused.value.remedy


def test_previews_are_events(client: Client):
    events = list(client.generate("a cat", preview_every_steps=2))
    assert [type(event) for event in events] == [Queued, StepDone, StepDone, Preview, Image, Summary]
    preview = events[3]
    assert isinstance(preview, Preview)
    assert (preview.step, preview.index, preview.to_pil().size) == (2, 0, (8, 4))


def test_the_frames_of_videos_are_apart(client: Client):
    result = client.generate_image("a cat", num_images=2, num_frames=3, seed=5)
    assert [(image.index, image.frame, image.seed) for image in result.encoded] == [
        *[(0, 0, 5), (0, 1, 5), (0, 2, 5)],
        *[(1, 0, 6), (1, 1, 6), (1, 2, 6)],
    ]
    assert [len(frames) for frames in result.frames] == [3, 3]
    assert result.frames[1][2].getpixel((0, 0)) == (80, 40, 0)
    assert [len(frames) for frames in client.generate_image("a cat", num_images=2).frames] == [1, 1]


def test_a_request_is_cancelled_by_its_id(client: Client, executor: FakeExecutor):
    assert client.cancel("known")
    assert not client.cancel("unknown")
    assert executor.cancelled == ["known", "unknown"]


def test_an_unknown_keyword_is_refused(client: Client):
    with pytest.raises(TypeError, match="sed"):
        client.generate("a cat", sed=7)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": 1 << 70},
        {"width": 8.5},
        {"output_format": "gif"},
        {"request_id": "a\tb"},
        {"priority": "urgent"},
        {"preview_every_steps": 1 << 40},
        {"image_strength": "much"},
    ],
)
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
    assert (model.modes, model.max_num_frames) == (("text_to_image", "inpaint"), 81)
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


def test_an_inspection_and_a_prefetch_take_pack_options(client: Client, store: FakeStore):
    options = PackOptions(waived=("bias",))
    client.inspect("sketch", options=options)
    list(client.prefetch("sketch", options=options))
    assert [PackOptions.from_proto(sent) for sent in store.options] == [options, options]


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
