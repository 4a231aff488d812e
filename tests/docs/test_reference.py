"""The tables of docs/reference.md are those of the code."""

from docs.explanations import CAUSES, REASONS
from docs.reference import PATH, reference


def test_the_reference_is_what_the_code_says():
    assert PATH.read_text() == reference(), "stale: run `python -m docs.reference`"


def test_settings_of_both_services_metrics_errors_causes_and_bases_are_in_it():
    text = PATH.read_text()
    for part in (
        "| `cache_bytes` | `--cache-bytes` | `LORAPLEX_STORE_CACHE_BYTES` | 53687091200 (50 GiB) |",
        "| `base_model` | `--base-model` | `LORAPLEX_EXECUTOR_BASE_MODEL` | required |",
        "| `grpc_server_handled_total` | counter | `grpc_type`, `grpc_service`, `grpc_method`, `grpc_code` |",
        "| `loraplex_store_rejections_total` | counter | `cause` |",
        "| `QUEUE_FULL` | RESOURCE_EXHAUSTED |",
        "| `NOT_FINITE` |",
        "| `sdxl-base-1.0` | StableDiffusionXLPipeline | unet, text_encoder, text_encoder_2 | 1059 |",
    ):
        assert part in text


def test_every_explanation_is_one_line_of_a_table():
    for sentence in [*CAUSES.values(), *(part for parts in REASONS.values() for part in parts)]:
        assert sentence
        assert "\n" not in sentence
        assert "|" not in sentence
