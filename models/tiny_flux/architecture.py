"""The untrained pipeline, and how it is written to `base/`."""

import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from .vocabulary import words

FOLDER = Path(__file__).parent
BASE = FOLDER / "base"
ADAPTERS = FOLDER / "adapters"

SIZE_PX = 64
LATENT_CHANNELS = 8
TOKENS = 12  # length of both token sequences in training: pass it as max_sequence_length
WIDTH = 128
POOLED = 64
PAD, END, UNKNOWN, START = range(4)
SPECIAL_TOKENS = ["<pad>", "</s>", "<unk>", "<s>"]


def build_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A lower-casing word-level tokenizer; `template` places the special tokens, as in `$A </s>`."""
    ids = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *words()])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(token, ids[token]) for token in ("<s>", "</s>") if token in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=TOKENS,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>" if "<s>" in template else None,
    )


def build_text_encoder(vocab_size: int) -> CLIPTextModel:
    """The CLIP encoder, of which Flux uses the output at the end token."""
    config = CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=POOLED,
        intermediate_size=4 * POOLED,
        projection_dim=POOLED,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    return CLIPTextModel(config)


def build_text_encoder_2(vocab_size: int) -> T5EncoderModel:
    """The T5 encoder, whose whole sequence the transformer attends to."""
    config = T5Config(
        vocab_size=vocab_size,
        d_model=WIDTH,
        d_kv=32,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )
    return T5EncoderModel(config)


def build_vae() -> AutoencoderKL:
    """The autoencoder, four times smaller in both directions, without attention."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIZE_PX,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
    )


def build_transformer() -> FluxTransformer2DModel:
    """Two double and four single blocks, four heads of 32, no guidance embedding."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=WIDTH // 4,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=POOLED,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def build_pipeline(seed: int = 0) -> FluxPipeline:
    """The whole pipeline with random weights, always the same for one seed, in float32 on the CPU."""
    torch.manual_seed(seed)
    tokenizer, tokenizer_2 = build_tokenizer("<s> $A </s>"), build_tokenizer("$A </s>")
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        vae=build_vae(),
        text_encoder=build_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder_2(len(tokenizer_2)),
        tokenizer_2=tokenizer_2,
        transformer=build_transformer(),
    )


def save_base(pipeline: FluxPipeline, folder: Path = BASE) -> None:
    """Write `pipeline` to `folder` in float16 and leave it so; readers see the old folder or the new one."""
    fresh, stale = folder.with_name("base.new"), folder.with_name("base.old")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    pipeline.to(dtype=torch.float16).save_pretrained(fresh)
    _name_tokenizers_as_everywhere(fresh)
    for file in fresh.rglob("*.safetensors"):
        file.chmod(0o644)
    if folder.exists():
        folder.rename(stale)
    fresh.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)


def _name_tokenizers_as_everywhere(folder: Path) -> None:
    """Write the tokenizer class by the name that older transformers know too."""
    name = "PreTrainedTokenizerFast"
    index_file = folder / "model_index.json"
    index = json.loads(index_file.read_text())
    for component in ("tokenizer", "tokenizer_2"):
        index[component] = ["transformers", name]
        config_file = folder / component / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) | {"tokenizer_class": name}
        config_file.write_text(json.dumps(config, indent=2) + "\n")
    index_file.write_text(json.dumps(index, indent=2) + "\n")
