"""One Generate request from end to end, as a client sees it, by where its adapter is."""

import time
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.adapter_files import write_adapter
from benchmarks.machine import PASSES, median
from benchmarks.tables import Column, Report
from deploy.local import Running
from loraplex import Client

_PROMPT = "a cat on a blue background"
# Two adapters per pass, one of them packed beforehand: of this rank, 16 are more than the executor's 255 rows hold.
_RANK = 16

_NONE, _NEW, _STORE, _HOST, _ROWS = (
    "no adapter",
    "a file, not yet converted",
    "in the store's cache",
    "in host memory",
    "resident",
)
_READY_FROM = {_NEW: "store", _STORE: "store", _HOST: "host_memory", _ROWS: "rows"}

_COLUMNS = (
    Column("adapter"),
    Column("request ms", ".0f"),
    Column("ratio to no adapter", ".2f"),
    Column("fetch ms", ".1f"),
    Column("load ms", ".2f"),
    Column("until it runs ms", ".1f"),
    Column("denoise ms", ".0f"),
)
_Times = tuple[float, float, float, float, float]


def measure_requests(running: Running, folder: Path) -> Report:
    """Requests for one image. `folder` is where the store looks for local adapters."""
    with Client(executor=running.executor, store=running.store) as client:
        model = client.model()
        pairs = [_write_pair(client, folder, number) for number in range(PASSES + 1)]
        times = _in_turns(client, pairs)
    width, height = model.resolutions[0]
    steps = model.default_num_inference_steps
    title = f"One request over gRPC, {model.base_model}, {width} x {height} px, {steps} steps, adapter of rank {_RANK}"
    report = Report("generate", title, _COLUMNS)
    medians = {case: tuple(map(median, zip(*seen, strict=True))) for case, seen in times.items()}
    for case in (_NONE, _ROWS, _HOST, _STORE, _NEW):
        request, *parts = (1e3 * seconds for seconds in medians[case])
        report.rows.append((case, request, request / (1e3 * medians[_NONE][0]), *parts))
    report.notes.append(f"the median of {PASSES} or more, the first left out; the whole request as the client sees it")
    return report


def _write_pair(client: Client, folder: Path, number: int) -> tuple[str, str]:
    """Two new adapters: one that the store has never seen, and one in its cache."""
    layout = client.model().layout
    names = (f"new-{number}", f"packed-{number}")
    for position, name in enumerate(names):
        write_adapter(folder / f"{name}.safetensors", layout, _RANK, torch.bfloat16, seed=2 * number + position)
    for _ in client.prefetch(names[1]):
        pass
    return names


def _in_turns(client: Client, pairs: list[tuple[str, str]]) -> dict[str, list[_Times]]:
    times: dict[str, list[_Times]] = defaultdict(list)
    for new, packed in pairs:
        for case, ref in ((_NONE, ""), (_NEW, new), (_ROWS, new), (_STORE, packed)):
            times[case].append(_request(client, case, ref))
    # The same order again: the least recently used adapter is always the next one, and was just evicted.
    for pair in pairs:
        times[_NONE].append(_request(client, _NONE, ""))
        for ref in pair:
            times[_HOST].append(_request(client, _HOST, ref))
    return times


def _request(client: Client, case: str, ref: str) -> _Times:
    began = time.perf_counter()
    result = client.generate_image(_PROMPT, seed=7, adapters={ref: 1.0} if ref else {})
    seconds = time.perf_counter() - began
    ready, summary = next(iter(result.adapters), None), result.summary
    if ready and ready.ready_from != _READY_FROM[case]:
        raise RuntimeError(f"{ref} was ready from {ready.ready_from}, not from {_READY_FROM[case]}")
    fetch_s, load_s = (ready.fetch_s, ready.load_s) if ready else (0.0, 0.0)
    return seconds, fetch_s, load_s, summary.queue_s, summary.denoise_s
