"""The module names of the original Stable Diffusion code (ldm, sgm), as kohya uses them for SDXL.

It counts the layers of all blocks in one row, up and down samplers included; how many layers a block has is read off
the layout.
"""

from collections.abc import Collection, Iterator

from adapter_store.dialects.original import OriginalName

_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_RESNET = {
    "time_emb_proj": "emb_layers.1",
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def original_names(paths: Collection[str]) -> Iterator[OriginalName]:
    """The original names of a UNet with these modules."""
    parts = [path.split(".") for path in paths]
    layers = _layers_per_block(parts)
    attentive = {words[1] for words in parts if words[0] == "up_blocks" and words[2] == "attentions"}
    for path, words in zip(paths, parts, strict=True):
        if path in _OUTSIDE:
            yield OriginalName(_OUTSIDE[path], (path,))
        elif words[0] in ("down_blocks", "mid_block", "up_blocks"):
            yield OriginalName(_in_block(words, layers, attentive), (path,))


def _layers_per_block(parts: list[list[str]]) -> int:
    """The layers of a down block; an up block has one more."""
    down, up = (
        [int(words[3]) + 1 for words in parts if words[0] == name and words[2] in ("resnets", "attentions")]
        for name in ("down_blocks", "up_blocks")
    )
    return max(down) if down else max(up, default=1) - 1


def _in_block(words: list[str], layers: int, attentive: Collection[str]) -> str:
    if words[0] == "mid_block":
        _, kind, layer, *rest = words
        return f"middle_block.{_inner(kind) + 2 * int(layer)}.{_module(kind, rest)}"
    side, block, kind, layer, *rest = words
    first = int(block) * (layers + 1)
    if side == "down_blocks":
        if kind == "downsamplers":
            return f"input_blocks.{first + layers + 1}.0.op"
        return f"input_blocks.{first + int(layer) + 1}.{_inner(kind)}.{_module(kind, rest)}"
    if kind == "upsamplers":
        return f"output_blocks.{first + layers}.{2 if block in attentive else 1}.conv"
    return f"output_blocks.{first + int(layer)}.{_inner(kind)}.{_module(kind, rest)}"


def _inner(kind: str) -> int:
    return 1 if kind == "attentions" else 0


def _module(kind: str, rest: list[str]) -> str:
    name = ".".join(rest)
    return name if kind == "attentions" else _RESNET.get(name, name)
