"""The whole store over a loopback channel, as an executor sees it."""

import asyncio
import hashlib
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import aio

from adapter_store.config import StoreSettings
from adapter_store.layouts import Layouts
from adapter_store.server import AdapterStoreServer
from adapter_store.service import AdapterStoreService, make_store
from adapter_store.wire import serialize_fetch
from loraplex.errors import ServiceError
from loraplex.layout import Layout
from loraplex.pack_options import PackOptions
from loraplex.packed import CHUNK_BYTES, PackedHeader
from loraplex.serving import serving
from loraplex.status import from_rpc_error
from loraplex.v1 import adapter_store_pb2 as pb
from loraplex.v1 import layout_pb2
from loraplex.v1.adapter_store_pb2_grpc import AdapterStoreStub
from tests.adapter_store.samples import WIDTH, delta, flux_layout, kohya, numbers, peft, unpack, write_adapter
from tests.adapter_store.test_cache_hostile import scribble

LAYOUT = flux_layout()
TO_Q = "transformer.transformer_blocks.0.attn.to_q"


class Served:
    """A running store and a client of it."""

    def __init__(self, stub: AdapterStoreStub, root: Path) -> None:
        self.stub, self.root = stub, root
        self.layout_digest = ""

    async def register(self, layout: Layout = LAYOUT) -> str:
        answer = await self.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=layout.to_proto()))
        self.layout_digest = answer.layout_digest
        return self.layout_digest

    async def fetch(
        self, ref: str, known_digest: str = "", options: layout_pb2.PackOptions | None = None
    ) -> tuple[pb.AdapterHeader, bytes]:
        request = pb.FetchAdapterRequest(
            ref=ref, layout_digest=self.layout_digest, known_digest=known_digest, options=options
        )
        parts = [part async for part in self.stub.FetchAdapter(request)]
        assert [part.WhichOneof("payload") for part in parts] == ["header", *["chunk"] * (len(parts) - 1)]
        return parts[0].header, b"".join(part.chunk for part in parts[1:])

    async def refusal(self, ref: str) -> ServiceError:
        with pytest.raises(aio.AioRpcError) as failed:
            await self.fetch(ref)
        return from_rpc_error(failed.value, "store")


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    (tmp_path / "root").mkdir()
    return StoreSettings(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        cache_dir=tmp_path / "cache",
        local_roots=(tmp_path / "root",),
    )


@pytest.fixture
async def served(settings: StoreSettings) -> AsyncIterator[Served]:
    async with serving(AdapterStoreService(settings), settings) as address, aio.insecure_channel(address) as channel:
        store = Served(AdapterStoreStub(channel), settings.local_roots[0])
        await store.register()
        yield store


async def test_an_adapter_arrives_as_its_header_says(served: Served, tmp_path: Path):
    tensors = kohya("lora_unet_double_blocks_0_img_attn_proj", WIDTH, WIDTH, 4, alpha=2) | peft(TO_Q, WIDTH, WIDTH, 2)
    source = write_adapter(served.root / "sketch.safetensors", tensors)
    header, packed = await served.fetch("sketch")
    assert header.digest == hashlib.sha256(packed).hexdigest()
    assert header.size_bytes == len(packed)
    assert header.commit == hashlib.sha256(source.read_bytes()).hexdigest()
    assert header.source == pb.ADAPTER_SOURCE_LOCAL
    assert header.rank == 4
    rows_bytes = PackedHeader.from_proto(header).rows_bytes(LAYOUT)
    assert [LAYOUT.modules[i].path for i in header.module_indexes] == [
        TO_Q,
        "transformer.transformer_blocks.0.attn.to_out.0",
    ]
    path = tmp_path / "packed.safetensors"
    path.write_bytes(packed)
    assert np.allclose(unpack(path)[TO_Q], delta(tensors, TO_Q), rtol=1e-5, atol=1e-5)
    assert len(packed) - rows_bytes == 8 + int.from_bytes(packed[:8], "little")


async def test_a_second_fetch_comes_from_the_cache_and_a_known_digest_sends_no_bytes(served: Served):
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    first, packed = await served.fetch("sketch")
    second, again = await served.fetch("sketch")
    assert (second.source, again) == (pb.ADAPTER_SOURCE_CACHE, packed)
    known, nothing = await served.fetch("sketch", known_digest=first.digest)
    assert known.unchanged
    assert nothing == b""


async def test_another_content_under_the_same_name_is_another_adapter(served: Served):
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    first, _ = await served.fetch("sketch")
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4, seed=9))
    second, packed = await served.fetch("sketch", known_digest=first.digest)
    assert second.digest != first.digest
    assert packed


async def test_a_large_adapter_arrives_in_chunks_of_at_most_one_mebibyte(served: Served):
    await served.register(flux_layout(width=512))
    write_adapter(served.root / "large.safetensors", peft(TO_Q.replace("to_q", "to_v"), 512, 512, 128) | _wide())
    request = pb.FetchAdapterRequest(ref="large", layout_digest=served.layout_digest)
    parts = [part async for part in served.stub.FetchAdapter(request)]
    sizes = [len(part.chunk) for part in parts[1:]]
    assert sum(sizes) == parts[0].header.size_bytes
    assert sizes[:-1] == [CHUNK_BYTES] * (len(sizes) - 1)
    assert len(sizes) > 2
    assert hashlib.sha256(b"".join(part.chunk for part in parts)).hexdigest() == parts[0].header.digest


def _wide() -> dict:
    return peft("transformer.transformer_blocks.0.norm1.linear", 6 * 512, 512, 128)


async def test_prefetch_reports_its_steps_and_then_the_adapter_is_there(served: Served):
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    request = pb.PrefetchRequest(ref="sketch", layout_digest=served.layout_digest)
    reports = [report async for report in served.stub.Prefetch(request)]
    stages = [report.stage for report in reports]
    assert stages == sorted(stages)
    assert stages[0] == pb.PREFETCH_STAGE_RESOLVING
    assert pb.PREFETCH_STAGE_PACKING in stages
    assert stages[-1] == pb.PREFETCH_STAGE_READY
    header, _ = await served.fetch("sketch")
    assert header.digest == reports[-1].header.digest
    assert header.source == pb.ADAPTER_SOURCE_CACHE


async def test_a_refused_file_names_cause_key_and_remedy(served: Served):
    write_adapter(served.root / "bad.safetensors", peft("transformer.NOPE", WIDTH, WIDTH, 4))
    error = await served.refusal("bad")
    assert (error.reason, error.metadata["cause"]) == ("ADAPTER_REJECTED", "UNKNOWN_MODULE")
    assert error.metadata["key"] == "transformer.NOPE.lora_A.weight"
    assert error.remedy


@pytest.mark.parametrize(
    ("ref", "reason"),
    [("missing", "ADAPTER_NOT_FOUND"), ("../outside", "INVALID_ADAPTER_REF"), ("several", "AMBIGUOUS_ADAPTER")],
)
async def test_a_reference_that_leads_nowhere_is_an_error(served: Served, ref: str, reason: str):
    for name in "ab":
        write_adapter(served.root / "several" / f"{name}.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    assert (await served.refusal(ref)).reason == reason


async def test_an_unknown_layout_is_an_error_and_a_registered_one_survives_a_restart(
    settings: StoreSettings, served: Served
):
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    digest, served.layout_digest = served.layout_digest, "0" * 64
    assert (await served.refusal("sketch")).reason == "UNKNOWN_LAYOUT"
    async with serving(AdapterStoreService(settings), settings) as address, aio.insecure_channel(address) as channel:
        other = Served(AdapterStoreStub(channel), served.root)
        other.layout_digest = digest
        header, _ = await other.fetch("sketch")
    assert header.rank == 4


async def test_inspect_describes_a_file_with_and_without_a_layout(served: Served):
    write_adapter(served.root / "sketch.safetensors", kohya("lora_unet_double_blocks_0_img_attn_qkv", 96, 32, 4, 2))
    alone = await served.stub.InspectAdapter(pb.InspectAdapterRequest(ref="sketch"))
    assert (alone.applicable, alone.HasField("rejection")) == (False, False)
    assert (list(alone.dialects), alone.tensors, alone.rank) == (["kohya"], 3, 4)
    assert [(m.name, m.alpha) for m in alone.modules] == [("double_blocks_0_img_attn_qkv", 2.0)]
    fitted = await served.stub.InspectAdapter(
        pb.InspectAdapterRequest(ref="sketch", layout_digest=served.layout_digest)
    )
    assert fitted.applicable
    assert [m.name.rpartition(".")[2] for m in fitted.modules] == ["to_q", "to_k", "to_v"]
    assert not [e for e in (await served.stub.ListAdapters(pb.ListAdaptersRequest())).adapters if e.cached]


@pytest.mark.parametrize(
    ("content", "cause"), [(b"<!DOCTYPE html><p>log in", "HTML_PAGE"), (b"", "EMPTY_FILE"), (b"\x80\x04K.", "PICKLE")]
)
async def test_inspect_reports_a_malformed_file_instead_of_failing(served: Served, content: bytes, cause: str):
    (served.root / "odd.safetensors").write_bytes(content)
    report = await served.stub.InspectAdapter(pb.InspectAdapterRequest(ref="odd", layout_digest=served.layout_digest))
    assert (report.applicable, report.rejection.cause) == (False, cause)
    assert report.rejection.message
    assert report.rejection.remedy


async def test_the_listing_is_paged_and_shows_what_is_cached(served: Served):
    for name in ("a", "b", "styles/c"):
        write_adapter(served.root / f"{name}.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    header, _ = await served.fetch("local:styles/c")
    first = await served.stub.ListAdapters(pb.ListAdaptersRequest(page_size=2))
    rest = await served.stub.ListAdapters(pb.ListAdaptersRequest(page_size=2, page_token=first.next_page_token))
    assert [one.ref for one in (*first.adapters, *rest.adapters)] == ["a", "b", "local:styles/c"]
    assert rest.next_page_token == ""
    cached = rest.adapters[0].cached
    assert [(one.digest, one.layout_digest) for one in cached] == [(header.digest, served.layout_digest)]
    assert cached[0].last_used_time.seconds > 0
    for one in (*first.adapters, *rest.adapters):
        await served.fetch(one.ref)


async def test_a_page_token_that_is_none_of_ours_is_refused(served: Served):
    write_adapter(served.root / "a.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    for token in ("!!", "YQ", "YQ==!", "é", "/w=="):
        with pytest.raises(aio.AioRpcError) as failed:
            await served.stub.ListAdapters(pb.ListAdaptersRequest(page_token=token))
        assert from_rpc_error(failed.value, "store").field == "page_token"


async def test_the_listing_shows_only_references_that_lead_back_to_their_files(served: Served, tmp_path: Path):
    hostile = (" lead", "back\\slash", "new\nline", "\x1b[31mred", "right\u202eleft", "bad\udcffutf8")
    good = ("a--b/c", "neon", "neon/other", "styles/c", "x")
    for name in (*hostile, *good):
        tensors = peft(TO_Q, WIDTH, WIDTH, 4, seed=len(name))
        path = write_adapter(served.root / "plain.safetensors", tensors)
        (served.root / f"{name}.safetensors").parent.mkdir(exist_ok=True)
        path.rename(served.root / f"{name}.safetensors")
    outside = write_adapter(tmp_path / "outside.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    (served.root / "out.safetensors").symlink_to(outside)
    (served.root / "loop.safetensors").symlink_to(served.root / "loop.safetensors")
    listed = (await served.stub.ListAdapters(pb.ListAdaptersRequest())).adapters
    refs = ["local:a--b/c", "local:neon/other", "local:styles/c", "neon.safetensors", "x"]
    assert [one.ref for one in listed] == refs
    for one in listed:
        header, _ = await served.fetch(one.ref)
        assert header.commit == hashlib.sha256((served.root / one.weight_name).read_bytes()).hexdigest()
    assert (await served.refusal("neon")).reason == "AMBIGUOUS_ADAPTER"
    for ref in ("loop", "out"):
        assert (await served.refusal(ref)).reason in ("ADAPTER_NOT_FOUND", "INVALID_ADAPTER_REF")


async def test_a_folder_whose_file_has_no_text_as_its_name_is_refused_with_details(served: Served):
    (served.root / "odd").mkdir()
    path = write_adapter(served.root / "plain.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    shutil.copy(path, served.root / "odd" / "bad\udcffutf8.safetensors")
    assert "bad" in (await served.refusal("odd")).message
    path.rename(served.root / "odd" / "good.safetensors")
    ambiguous = await served.refusal("odd")
    assert ambiguous.reason == "AMBIGUOUS_ADAPTER"
    assert "good.safetensors" in ambiguous.message


async def test_a_key_with_half_a_character_is_refused_with_details(served: Served):
    text = b'{"a\\ud800.lora_A.weight":{"dtype":"Q8","shape":[1],"data_offsets":[0,1]}}'
    (served.root / "half.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    error = await served.refusal("half")
    assert (error.reason, error.metadata["key"]) == ("ADAPTER_REJECTED", r"a\ud800.lora_A.weight")


@pytest.mark.parametrize("keep_time", [False, True])
async def test_a_packed_file_that_is_damaged_while_the_store_runs_is_made_again(
    served: Served, settings: StoreSettings, keep_time: bool
):
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    header, packed = await served.fetch("sketch")
    scribble(settings.cache_dir / "packed" / f"{header.digest}.safetensors", keep_time)
    again, packed_again = await served.fetch("sketch")
    assert (again.digest, packed_again, again.source) == (header.digest, packed, pb.ADAPTER_SOURCE_LOCAL)


@pytest.mark.parametrize("removed", [".", "packed", "temp", "index", "layouts", "downloads"])
async def test_folders_that_are_removed_while_the_store_runs_are_made_again(
    served: Served, settings: StoreSettings, removed: str
):
    write_adapter(served.root / "one.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    write_adapter(served.root / "two.safetensors", peft(TO_Q, WIDTH, WIDTH, 4, seed=1))
    _, packed = await served.fetch("one")
    shutil.rmtree(settings.cache_dir / removed)
    for _ in range(2):
        assert (await served.fetch("one"))[1] == packed
    await served.fetch("two")
    assert len((await served.stub.ListAdapters(pb.ListAdaptersRequest())).adapters) == 2
    other = flux_layout("BF16")
    digest = await served.register(other)
    assert Layouts(settings.cache_dir / "layouts").get(digest) == other
    await served.register()
    assert Layouts(settings.cache_dir / "layouts").get(LAYOUT.digest) == LAYOUT
    await served.fetch("two")


async def test_fifty_concurrent_fetches_are_one_conversion(served: Served):
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    fetched = await asyncio.gather(*(served.fetch("sketch") for _ in range(50)))
    assert len({packed for _, packed in fetched}) == 1
    assert {header.source for header, _ in fetched} <= {pb.ADAPTER_SOURCE_LOCAL, pb.ADAPTER_SOURCE_CACHE}


async def test_a_peft_folder_is_read_with_its_config(served: Served):
    name = "base_model.model.transformer_blocks.0.attn.to_q"
    write_adapter(served.root / "mine" / "adapter_model.safetensors", peft(name, WIDTH, WIDTH, 4))
    plain, _ = await served.fetch("mine")
    (served.root / "mine" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    scaled, _ = await served.fetch("mine")
    assert scaled.digest != plain.digest
    (served.root / "mine" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}')
    assert (await served.refusal("mine")).metadata["cause"] == "ALPHA_CONFLICT"


async def test_a_stream_that_is_left_early_releases_its_file(settings: StoreSettings):
    write_adapter(settings.local_roots[0] / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    store, layouts = make_store(settings), Layouts(settings.cache_dir / "layouts")
    server = AdapterStoreServer(store, layouts, settings.local_roots)
    layout = layouts.register(LAYOUT.to_proto())
    stream = server.fetch_adapter(pb.FetchAdapterRequest(ref="sketch", layout_digest=layout.digest), None)
    await anext(stream)
    await anext(stream)
    assert "1 pinned" in repr(store.cache)
    await stream.aclose()
    assert "0 pinned" in repr(store.cache)
    await store.close()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, CHUNK_BYTES])
def test_a_chunk_is_on_the_wire_exactly_what_protobuf_would_write(size: int):
    payload = bytes(i % 251 for i in range(size))
    wire = serialize_fetch(memoryview(payload))
    assert wire == pb.FetchAdapterResponse(chunk=payload).SerializeToString()
    assert pb.FetchAdapterResponse.FromString(wire).chunk == payload


def test_a_chunk_has_these_bytes_on_the_wire():
    assert serialize_fetch(memoryview(b"abc")) == b"\x12\x03abc"
    assert serialize_fetch(memoryview(b"\0" * 300))[:3] == b"\x12\xac\x02"


ONE_OPTION = [
    ({"waived": ["lora"]}, "options.waived"),
    ({"denoiser": "decoder"}, "options.denoiser"),
    ({"max_rank": -1}, "options.max_rank"),
    ({"max_error": 1.5}, "options.max_error"),
    ({"max_error": float("nan")}, "options.max_error"),
]


@pytest.mark.parametrize(("fields", "named"), ONE_OPTION)
async def test_options_of_no_use_are_refused_by_every_call_that_takes_them(
    served: Served, fields: dict[str, Any], named: str
):
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    request = {"ref": "sketch", "layout_digest": served.layout_digest, "options": layout_pb2.PackOptions(**fields)}
    calls = [
        served.stub.FetchAdapter(pb.FetchAdapterRequest(**request)).read,
        served.stub.Prefetch(pb.PrefetchRequest(**request)).read,
        lambda: served.stub.InspectAdapter(pb.InspectAdapterRequest(**request)),
    ]
    for call in calls:
        with pytest.raises(aio.AioRpcError) as failed:
            await call()
        error = from_rpc_error(failed.value, "store")
        assert (error.reason, error.field) == ("INVALID_REQUEST", named)


async def test_another_choice_of_options_is_another_adapter_and_its_header_tells_what_it_cost(served: Served):
    extra = {f"{TO_Q}.diff_b": numbers(WIDTH)}
    write_adapter(served.root / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 8) | extra)
    assert (await served.refusal("sketch")).metadata["cause"] == "BIAS_DIFFERENCE"
    waived, _ = await served.fetch("sketch", options=layout_pb2.PackOptions(waived=["bias"]))
    assert (waived.rank, waived.waived_tensors, waived.error) == (8, 1, 0.0)
    cut, _ = await served.fetch("sketch", options=layout_pb2.PackOptions(waived=["bias"], max_rank=4, max_error=0.9))
    assert (cut.rank, cut.waived_tensors) == (4, 1)
    assert 0 < cut.error < 0.9
    assert cut.digest != waived.digest
    again, _ = await served.fetch("sketch", options=layout_pb2.PackOptions(waived=["bias", "bias"]))
    assert (again.source, again.digest, again.waived_tensors) == (pb.ADAPTER_SOURCE_CACHE, waived.digest, 1)


async def test_an_adapter_packed_with_options_is_found_again_after_the_index_was_lost(settings: StoreSettings):
    write_adapter(settings.local_roots[0] / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 8))
    options = layout_pb2.PackOptions(max_rank=4, max_error=0.9)
    headers = []
    for _ in range(2):
        async with (
            serving(AdapterStoreService(settings), settings) as address,
            aio.insecure_channel(address) as channel,
        ):
            store = Served(AdapterStoreStub(channel), settings.local_roots[0])
            await store.register()
            headers.append((await store.fetch("sketch", options=options))[0])
        shutil.rmtree(settings.cache_dir / "index")
    assert [header.source for header in headers] == [pb.ADAPTER_SOURCE_LOCAL, pb.ADAPTER_SOURCE_CACHE]
    assert (headers[1].digest, headers[1].error) == (headers[0].digest, headers[0].error)


async def test_inspect_tells_what_becomes_of_every_tensor_and_of_every_module(served: Served):
    to_k = TO_Q.replace("to_q", "to_k")
    factors = [(i, side, shape) for i in (1, 2) for side, shape in (("a", (WIDTH, 3)), ("b", (3, WIDTH)))]
    tensors = {f"{to_k}.hada_w{i}_{side}": numbers(*shape, seed=i) for i, side, shape in factors}
    tensors |= kohya(TO_Q, WIDTH, WIDTH, 8, 2)
    tensors |= {f"{TO_Q}.diff_b": numbers(WIDTH), f"{to_k}.diff_b": numbers(WIDTH) * 0}
    write_adapter(served.root / "mixed.safetensors", tensors)
    options = layout_pb2.PackOptions(waived=["bias"], max_rank=8, max_error=0.9)
    request = pb.InspectAdapterRequest(ref="mixed", layout_digest=served.layout_digest, options=options)
    report = await served.stub.InspectAdapter(request)
    assert report.applicable
    assert (report.applied_tensors, report.zero_tensors, list(report.waived_keys)) == (7, 1, [f"{TO_Q}.diff_b"])
    assert report.tensors == report.applied_tensors + report.zero_tensors + len(report.waived_keys)
    q, k = report.modules
    assert (q.algorithm, q.rank, q.alpha, q.packed_rank, q.error) == ("LoRA", 8, 2.0, 8, 0.0)
    assert (k.algorithm, k.rank, k.HasField("alpha"), k.packed_rank) == ("LoHa", 3, False, 8)
    assert 0 < k.error < 0.9
    alone = await served.stub.InspectAdapter(pb.InspectAdapterRequest(ref="mixed", options=options))
    assert (alone.applied_tensors, alone.zero_tensors, len(alone.waived_keys)) == (7, 1, 1)
    assert [module.packed_rank for module in alone.modules] == [0, 0]


async def test_a_small_adapter_does_not_wait_for_a_large_one(settings: StoreSettings):
    """Numbers are worked on in threads, and numpy lets go of the interpreter meanwhile."""
    large = {f"{TO_Q}.diff": numbers(768, 768)} | {f"{TO_Q.replace('to_q', 'to_k')}.diff": numbers(768, 768)}
    write_adapter(settings.local_roots[0] / "large.safetensors", large)
    write_adapter(settings.local_roots[0] / "small.safetensors", peft(TO_Q.replace("to_q", "to_v"), 768, 768, 4))
    store, layout = make_store(settings), flux_layout(width=768)
    slow = asyncio.create_task(store.prepare("large", layout, options=PackOptions(max_error=0.999)))
    await asyncio.sleep(0.05)
    began_s = time.perf_counter()
    await store.prepare("small", layout)
    small_s = time.perf_counter() - began_s
    assert not slow.done()
    await slow
    assert small_s < time.perf_counter() - began_s
    await store.close()
