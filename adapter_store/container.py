"""Writing safetensors: the header for tensors that follow it in order.

safetensors' own writers know numpy's or torch's dtypes, and want all tensors in memory at once; numpy has no bfloat16.
"""

import json
import math
from collections.abc import Iterable, Mapping

from adapter_store.dtypes import SIZES

# name, dtype as safetensors spells it, shape
Spec = tuple[str, str, tuple[int, ...]]


def header(metadata: Mapping[str, str], tensors: Iterable[Spec], length: int = 0) -> bytes:
    """The first bytes of a file whose data section holds `tensors` one after the other. Same input, same bytes.

    Filled up with spaces to `length` bytes, a multiple of 8, unless it is longer by itself.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * SIZES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % 8, length - 8 - len(text))
    return len(text).to_bytes(8, "little") + text
