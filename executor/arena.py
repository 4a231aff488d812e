"""The rank rows themselves, and the row table that says which of them each sample of a batch uses.

Both are allocated once; their data pointers never change, so a compiled graph that has seen them stays right.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import torch

from executor.rows import ZERO_ROW
from loraplex.layout import ColumnRun, Layout

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Arena:
    """All rank rows of an executor: `rows` [num_rows, layout.width], zeros at first. Device thread only."""

    def __init__(self, layout: Layout, num_rows: int, device: torch.device) -> None:
        self.layout = layout
        # Most adapters touch one of a few sets of modules, and 494 of them take a millisecond.
        self._column_runs = lru_cache(maxsize=32)(layout.column_runs)
        self.rows = torch.zeros(num_rows, layout.width, dtype=TORCH_DTYPES[layout.dtype], device=device)

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [num_rows, a_width] and B transposed [num_rows, out] of the layout's module `index`, as views."""
        start, module = self.layout.offsets[index], self.layout.modules[index]
        middle = start + module.a_width
        return self.rows[:, start:middle], self.rows[:, middle : middle + module.b_width]

    def check(self, rank: int, packed: torch.Tensor, module_indexes: Sequence[int]) -> None:
        """Raise ValueError unless `packed` is [rank, width of these modules] of the arena's dtype."""
        expected = (rank, sum(run.length for run in self._column_runs(tuple(module_indexes))))
        if packed.shape != expected or packed.dtype != self.rows.dtype:
            raise ValueError(
                f"packed rows are {tuple(packed.shape)} {packed.dtype}, expected {expected} {self.rows.dtype}"
            )

    def load(self, rows: Sequence[int], packed: torch.Tensor, module_indexes: Sequence[int]) -> None:
        """Overwrite `rows` of every module with `packed` [len(rows), width]; untouched modules get zeros.

        All checks come before the first write. Raises ValueError when the shapes, the dtype or the rows do not fit.
        """
        self.check(len(rows), packed, module_indexes)
        if len(set(rows)) != len(rows) or not all(ZERO_ROW < row < len(self.rows) for row in rows):
            raise ValueError(f"rows must be distinct and within 1 to {len(self.rows) - 1}, got {list(rows)}")
        runs = self._column_runs(tuple(module_indexes))
        staged = packed.to(self.rows.device, non_blocking=True)
        for first, count, source in _row_runs(rows):
            self._write(self.rows[first : first + count], staged[source : source + count], runs)

    def clear(self, rows: Sequence[int]) -> None:
        """Zero `rows` of every module."""
        for first, count, _ in _row_runs(rows):
            self.rows[first : first + count].zero_()

    def _write(self, target: torch.Tensor, source: torch.Tensor, runs: Sequence[ColumnRun]) -> None:
        end = 0
        for run in runs:
            if run.arena_start > end:
                target[:, end : run.arena_start].zero_()
            end = run.arena_start + run.length
            target[:, run.arena_start : end].copy_(source[:, run.packed_start : run.packed_start + run.length])
        if end < target.shape[1]:
            target[:, end:].zero_()


class RowTable:
    """The active rows of every sample: `row_index` and `row_strength`, both [batch, R]. Device thread only."""

    def __init__(self, max_batch: int, rows_per_sample: int, device: torch.device) -> None:
        self.row_index = torch.full((max_batch, rows_per_sample), ZERO_ROW, dtype=torch.int64, device=device)
        self.row_strength = torch.zeros(max_batch, rows_per_sample, dtype=torch.float32, device=device)
        self.batch = max_batch  # samples of the call that runs, for layers that cannot tell from their input
        self._written: list[tuple[tuple[int, float], ...]] = [()] * max_batch

    def select(self, samples: Sequence[tuple[tuple[int, float], ...]]) -> None:
        """Sample i uses the rows `samples[i]`, pairs of row and strength; samples that did not change cost nothing.

        Raises ValueError when there are more samples than the batch, or more rows than R.
        """
        if len(samples) > len(self._written):
            raise ValueError(f"{len(samples)} samples, the row table holds {len(self._written)}")
        longest = max(map(len, samples), default=0)
        if longest > self.row_index.shape[1]:
            raise ValueError(f"{longest} rows for one sample, the row table holds {self.row_index.shape[1]}")
        self.batch = len(samples)
        for sample, active in enumerate(samples):
            if active != self._written[sample]:
                self._write(sample, active)

    def _write(self, sample: int, active: tuple[tuple[int, float], ...]) -> None:
        padding = self.row_index.shape[1] - len(active)
        rows = torch.tensor([row for row, _ in active] + [ZERO_ROW] * padding)
        strengths = torch.tensor([strength for _, strength in active] + [0.0] * padding)
        self.row_index[sample].copy_(rows)
        self.row_strength[sample].copy_(strengths)
        self._written[sample] = active


def _row_runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive rows as (first row, count, position in `rows`)."""
    runs = []
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        members = list(group)
        runs.append((members[0][1], len(members), members[0][0]))
    return runs
