"""The module names of the original LTX-Video and LTX-2 code, where they are not diffusers' own."""

from collections.abc import Iterator

from adapter_store.dialects.original import OriginalName

_PROJECTIONS = (("patchify_proj", "proj_in"), ("audio_patchify_proj", "audio_proj_in"))
_MODULATIONS = (
    ("adaln_single", "time_embed"),
    ("audio_adaln_single", "audio_time_embed"),
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_prompt_adaln_single", "audio_prompt_adaln"),
)


def _modulation(original: str, ours: str) -> Iterator[OriginalName]:
    for layer in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2"):
        yield OriginalName(f"{original}.{layer}", (f"{ours}.{layer}",))


TABLE = (
    *(OriginalName(original, (ours,)) for original, ours in _PROJECTIONS),
    *(row for original, ours in _MODULATIONS for row in _modulation(original, ours)),
)
