"""Packed adapters into rows while the device computes: a thread of its own and, on CUDA, a stream of its own."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch

from executor import metrics
from executor.arena import Arena
from executor.store_client import PackedAdapter


class Loader:
    """Writes one adapter after the other, so rows that change hands twice end with their last owner's numbers."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        is_cuda = arena.rows.device.type == "cuda"
        self._stream = torch.cuda.Stream(arena.rows.device) if is_cuda else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")

    def load(self, rows: Sequence[int], adapter: PackedAdapter) -> Future[float]:
        """Write `adapter` into `rows`, which nothing selects; done when any stream may read them. In seconds.

        Device thread only: what it has queued on the device may still read the last owner's numbers, and is waited
        for. When the load fails the rows are zeros.
        """
        queued = torch.cuda.current_stream().record_event() if self._stream else None
        return self._thread.submit(self._load, rows, adapter, queued)

    def close(self) -> None:
        """End the thread once it has done all loads."""
        self._thread.shutdown()

    def _load(self, rows: Sequence[int], adapter: PackedAdapter, queued: torch.cuda.Event | None) -> float:
        began = time.monotonic()
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if self._stream and queued:
                self._stream.wait_event(queued)
            try:
                self._arena.load(rows, adapter.rows, adapter.header.module_indexes)
            except BaseException:
                self._arena.clear(rows)
                raise
            finally:
                if self._stream:
                    self._stream.synchronize()
        seconds = time.monotonic() - began
        metrics.LOADS.inc()
        metrics.LOAD_SECONDS.observe(seconds)
        return seconds
