"""The diffusers pipeline as jobs share it."""

import logging
import threading

import pytest

from executor.service import LoadedModel
from loraplex.errors import InvalidRequest

from .samples import Watched, parameters


def test_adapters_modify_the_denoiser_and_the_text_encoders_and_not_the_autoencoder(model: LoadedModel) -> None:
    assert list(model.base.adaptable) == ["transformer", "text_encoder", "text_encoder_2"]
    assert {module.component for module in model.layout.modules} == set(model.base.adaptable)


@pytest.mark.parametrize(
    ("negative_prompt", "true_cfg_scale", "field"),
    [("blur", 1.0, "true_cfg_scale"), ("blur", 0.5, "true_cfg_scale"), ("", 4.0, "negative_prompt")],
)
def test_what_the_pipeline_would_ignore_is_refused(
    model: LoadedModel, negative_prompt: str, true_cfg_scale: float, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        model.base.check(parameters(negative_prompt=negative_prompt, true_cfg_scale=true_cfg_scale))
    assert refused.value.field == field
    model.base.check(parameters(negative_prompt="blur", true_cfg_scale=4.0))
    model.base.check(parameters())


def test_jobs_that_run_together_do_not_share_a_tokenizer(model: LoadedModel) -> None:
    wrong: list[tuple[int, ...]] = []

    def tokenize() -> None:
        with model.base._tokenizers() as own:
            for _ in range(150):
                padded = own["tokenizer_2"](["a red circle"], padding="max_length", max_length=16, truncation=True)
                longest = own["tokenizer_2"](["a red circle"], padding="longest")
                lengths = len(padded["input_ids"][0]), len(longest["input_ids"][0])
                if lengths[0] != 16 or lengths[1] > 8:
                    wrong.append(lengths)

    threads = [threading.Thread(target=tokenize) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_long_prompt_is_not_quoted_in_the_log(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(prompt="red circle " * 40)
    diffusers_log = logging.getLogger("diffusers")  # it has a handler of its own and does not propagate
    diffusers_log.addHandler(caplog.handler)
    try:
        model.engine.submit(watched.job, ())
        watched.end()
    finally:
        diffusers_log.removeHandler(caplog.handler)
    assert watched.images
    assert "circle" not in caplog.text


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_a_prompt_that_would_be_cut_off_is_refused(model: LoadedModel, field: str) -> None:
    text = "a red circle on a white background " * 3
    with pytest.raises(InvalidRequest, match="tokens long") as caught:
        model.base.check(parameters(**{field: text}))
    assert caught.value.field == field
