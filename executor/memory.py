"""Where memory goes: how many rank rows there is room for, and the account of it at start."""

from collections.abc import Mapping

import torch
from torch import nn

from executor.config import ExecutorSettings
from executor.errors import UnsupportedOption
from loraplex.layout import Layout


def choose_rows(settings: ExecutorSettings, layout: Layout, device: torch.device) -> int:
    """How many rows the arena gets, the zero row included: by number, by bytes, or by a share of what is free now.

    Raises UnsupportedOption when one image could not be served.
    """
    num_rows, why = settings.arena_rows, "arena_rows"
    if settings.arena_bytes:
        num_rows, why = settings.arena_bytes // layout.row_bytes, "arena_bytes"
    elif settings.arena_share:
        if device.type != "cuda":
            raise UnsupportedOption(
                f"arena_share: what is free on {device} is not known; set arena_rows or arena_bytes."
            )
        free, _ = torch.cuda.mem_get_info(device)
        num_rows, why = int(settings.arena_share * free) // layout.row_bytes, "arena_share"
    if num_rows <= settings.rows_per_sample:
        raise UnsupportedOption(
            f"{why}: there is room for {num_rows} rows of {layout.row_bytes / 1e6:.2f} MB; one image may use "
            f"{settings.rows_per_sample}, and one row is kept zero."
        )
    return num_rows


def account(components: Mapping[str, nn.Module], arena: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Megabytes by what holds them: every component, the arena and, on a GPU, what else is used and free."""
    megabytes = {f"{name}_mb": _size(model) / 1e6 for name, model in components.items()} | {
        "arena_mb": arena.nbytes / 1e6
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        known = torch.cuda.memory_allocated(device)
        megabytes["other_mb"] = (total - free - known) / 1e6
        megabytes["free_mb"] = free / 1e6
    return {name: round(size, 1) for name, size in megabytes.items()}


def _size(model: nn.Module) -> int:
    """Bytes of parameters and buffers; of quantised ones, those of the tensors inside."""
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return sum(_bytes(one) for one in tensors.values())


def _bytes(tensor: torch.Tensor) -> int:
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is None:
        return tensor.nbytes
    return sum(_bytes(getattr(tensor, name)) for name in names()[0])
