"""What the fuzzer does to a file: to its bytes, its JSON, its entries, its names, its numbers."""

import contextlib
import copy
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

from tests.hostile.fuzz.seeds import Seed

DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I8", "U8", "BOOL", "C64", "F4", "f32", "")
PREFIXES = (
    *("lora_unet_", "lora_unet__", "lora_transformer_", "lycoris_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_"),
    *("unet.", "transformer.", "text_encoder.", "text_encoder_2.", "diffusion_model.", "model.diffusion_model.", ""),
    *("base_model.model.", "base_model.model.transformer.", "text_encoders.clip_l.transformer.", "transformer_2."),
    *("text_encoders.t5xxl.transformer.", "oft_unet_", "lora_prior_unet_", "bundle_emb.", "Hunyuan_video_I2V_lora_"),
)
# By what they are to their module: most exchanges between dialects keep a file good.
SUFFIXES = (
    *(".lora_A.weight", ".lora_down.weight", ".lora.down.weight", ".lora_linear_layer.down.weight", ".lora_A"),
    *(".lora_A.default.weight", "_lora.down.weight", "_lora1.down.weight"),
    *(".lora_B.weight", ".lora_up.weight", ".lora.up.weight", ".lora_linear_layer.up.weight", ".lora_B"),
    *(".lora_B.default.weight", "_lora.up.weight", "_lora1.up.weight"),
    *(".lora_mid.weight", ".alpha", ".diff", ".diff_b", ".w_norm", ".b_norm", ".dora_scale", ".set_weight"),
    *(f".hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(f".lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t1", "t2")),
    *(".a1.weight", ".bm.weight", ".oft_blocks", ".rescale", ".on_input", ".weight", ".bias", ".lora_B.bias"),
    *(".lora_magnitude_vector", ".lora_magnitude_vector.weight", ".norm.scale", ".reshape_weight"),
)
_DIALECTS = (
    *((".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight"), (".lora_A", ".lora_B")),
    *((".lora.down.weight", ".lora.up.weight"), (".lora_A.x.weight", ".lora_B.x.weight")),
)
_SUFFIX = re.compile("(" + "|".join(re.escape(one) for one in sorted(SUFFIXES, key=len, reverse=True)) + ")$")
_PREFIX = re.compile("(" + "|".join(re.escape(one) for one in sorted(PREFIXES, key=len, reverse=True) if one) + ")")
NUMBERS = (0, 1, -1, 2, 3, 4, 7, 8, 1 << 31, 1 << 32, 1 << 53, 1 << 63, 1 << 64, 10**30, 1.0, 0.5, 1e300, True, None)
VALUES = (0.0, -0.0, 1.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e-39, 1e-9, 65504.0, 7e4, 3.3e38, -1e20)
JUNK = ("", "a", [], {}, [1], {"a": 1}, "F32", float("nan"), float("inf"), "\x1b[2J", "\ud800", "漢", *NUMBERS)

Entries = dict[str, Any]


def split(content: bytes) -> tuple[Entries, bytes] | None:
    """Header and data; None when it is not that any more."""
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    return (header, content[8 + length :]) if isinstance(header, dict) else None


def join(header: Any, data: bytes) -> bytes:
    """The other way."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def flip_header_bytes(chance: random.Random, content: bytes) -> bytes:
    """One to three bytes of the length or the JSON."""
    return _flip(chance, content, 0, 8 + int.from_bytes(content[:8], "little"))


def flip_bytes(chance: random.Random, content: bytes) -> bytes:
    """One to three bytes anywhere."""
    return _flip(chance, content, 0, len(content))


def _flip(chance: random.Random, content: bytes, begin: int, end: int) -> bytes:
    changed = bytearray(content)
    end = min(end, len(changed))
    for _ in range(chance.randint(1, 3) if end > begin else 0):
        place = chance.randrange(begin, end)
        changed[place] = chance.choice((changed[place] ^ 1 << chance.randrange(8), chance.randrange(256)))
    return bytes(changed)


def edit_json(chance: random.Random, content: bytes) -> bytes:
    """Put junk in the place of some value, delete it, or name it twice."""
    if (parts := split(content)) is None:
        return content
    header, data = copy.deepcopy(parts[0]), parts[1]
    node: Any = header
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            return content
        place = chance.choice(places)
        if not isinstance(node[place], dict | list) or chance.random() < 0.3:
            break
        node = node[place]
    action = chance.choice(("junk", "delete", "twice", "wrap"))
    if action == "twice" and isinstance(place, str):
        text = json.dumps(header)
        again = f"{json.dumps(place)}: {json.dumps(node[place])}"
        return join(text.replace(again, f"{again}, {again}", 1).encode("utf-8", "surrogatepass"), data)
    if action == "delete":
        del node[place]
    elif action == "wrap":
        node[place] = [node[place]]
    else:
        node[place] = chance.choice(JUNK)
    return join(header, data)


def edit_entry(chance: random.Random, content: bytes) -> bytes:
    """The dtype, the shape or the offsets of one tensor; sometimes so that its size stays right."""
    if (parts := split(content)) is None or not (names := _tensors(parts[0])):
        return content
    header, data = parts
    entry = header[chance.choice(names)]
    what = chance.choice(("dtype", "shape", "data_offsets", "reshape", "transpose"))
    if what == "dtype":
        entry["dtype"] = chance.choice(DTYPES)
    elif what == "reshape":
        entry["shape"] = chance.choice(([*entry["shape"], 1], [*entry["shape"], 1, 1], entry["shape"][:-1], [1]))
    elif what == "transpose":
        entry["shape"] = entry["shape"][::-1]
    elif entry[what]:
        entry[what][chance.randrange(len(entry[what]))] = chance.choice(NUMBERS)
    return join(header, data)


def rename(chance: random.Random, content: bytes) -> bytes:
    """One name's prefix, end or middle; or all names to another dialect, so that the file stays good."""
    if (parts := split(content)) is None or not (names := _tensors(parts[0])):
        return content
    header, data = parts
    how = chance.choice(("prefix", "suffix", "all prefixes", "dialect", "letter", "underscores", "exchange"))
    name = chance.choice(names)
    if how == "dialect":
        old, new = chance.sample(_DIALECTS, 2)
        mapping = {n: n.replace(old[0], new[0]).replace(old[1], new[1]) for n in names}
    elif how == "all prefixes":
        prefix = chance.choice(PREFIXES)
        mapping = {n: _with_prefix(n, prefix) for n in names}
    elif how == "prefix":
        mapping = {name: _with_prefix(name, chance.choice(PREFIXES))}
    elif how == "suffix":
        mapping = {name: _SUFFIX.sub("", name) + chance.choice(SUFFIXES)}
    elif how == "underscores":
        mapping = {n: _flattened(n) for n in names}
    elif how == "exchange":
        other = chance.choice(names)
        mapping = {name: other, other: name}
    else:
        place = chance.randrange(len(name) + 1)
        mapping = {name: name[:place] + chance.choice("0123456789._qkvAB") + name[place + chance.randrange(2) :]}
    return join({mapping.get(n, n): entry for n, entry in header.items()}, data)


def _with_prefix(name: str, prefix: str) -> str:
    return prefix + _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else prefix + name


def _flattened(name: str) -> str:
    match = _SUFFIX.search(name)
    stem, end = (name[: match.start()], match[0]) if match else (name, "")
    return "lora_unet_" + _PREFIX.sub("", stem, count=1).replace(".", "_") + end


def edit_numbers(chance: random.Random, content: bytes) -> bytes:
    """A few numbers of one tensor, or all of them."""
    if (parts := split(content)) is None or not (names := _tensors(parts[0])):
        return content
    header, data = parts[0], bytearray(parts[1])
    entry = header[chance.choice(names)]
    try:
        begin, end = entry["data_offsets"]
        code = {"F64": "d", "F32": "f", "F16": "e"}.get(entry["dtype"], "B")
        size = struct.calcsize(code)
        places = range(begin, end - size + 1, size)
        for place in places if chance.random() < 0.2 else chance.sample(places, min(len(places), 2)):
            value = chance.randrange(256) if code == "B" else chance.choice(VALUES)
            struct.pack_into(f"<{code}", data, place, value)
    except (TypeError, ValueError, KeyError, struct.error, OverflowError):
        return content
    return join(header, bytes(data))


def cut_or_extend(chance: random.Random, content: bytes) -> bytes:
    """Another length of the file."""
    if chance.random() < 0.7:
        return content[: chance.randrange(len(content) + 1)]
    return content + chance.randbytes(chance.choice((1, 4, 100)))


def edit_metadata(chance: random.Random, content: bytes) -> bytes:
    """What peft might have noted, true or not."""
    if (parts := split(content)) is None:
        return content
    component = chance.choice(("transformer.", "unet.", "text_encoder.", ""))
    field = chance.choice(("r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "peft_type", "use_dora"))
    value = chance.choice((*JUNK, 4, 8, 2, {"to_q": 4}, {"^to_q$": 4}, {"(a+)+$": 4}, {"attn.to_q": 2.5}))
    text = chance.choice((json.dumps({component + field: value, component + "lora_alpha": 4}), "{", "[]", "null"))
    return join(parts[0] | {"__metadata__": {"lora_adapter_metadata": text}}, parts[1])


def splice(chance: random.Random, content: bytes, other: bytes) -> bytes:
    """The tensors of two files in one, or the bytes of one after those of the other."""
    first, second = split(content), split(other)
    if first is None or second is None or chance.random() < 0.2:
        return content[: chance.randrange(len(content) + 1)] + other[chance.randrange(len(other)) :]
    header, data = dict(first[0]), first[1]
    for name in _tensors(second[0]):
        entry = copy.deepcopy(second[0][name])
        try:
            entry["data_offsets"] = [offset + len(data) for offset in entry["data_offsets"]]
        except (TypeError, KeyError):
            return content
        header[name] = entry
    return join(header, data + second[1])


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "header bytes": flip_header_bytes,
    "bytes": flip_bytes,
    "JSON": edit_json,
    "entries": edit_entry,
    "names": rename,
    "numbers": edit_numbers,
    "length": cut_or_extend,
    "metadata": edit_metadata,
}


def mutate(chance: random.Random, seed: Seed, others: list[Seed]) -> tuple[bytes, str]:
    """A changed file, and what was done to it last."""
    content, name = seed.content, ""
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        name = chance.choice((*MUTATIONS, "names", "numbers", "splice"))
        if name == "splice":
            same = [other for other in others if other.layout.base_model == seed.layout.base_model]
            content = splice(chance, content, chance.choice(same).content)
        else:
            # An earlier change may have left nothing that this one could be done to.
            with contextlib.suppress(TypeError, KeyError, IndexError, AttributeError, ValueError):
                content = MUTATIONS[name](chance, content)
    return content, name


def _tensors(header: Entries) -> list[str]:
    return [n for n, e in header.items() if n != "__metadata__" and isinstance(e, dict) and e.keys() >= _FIELDS]


_FIELDS = {"dtype", "shape", "data_offsets"}
