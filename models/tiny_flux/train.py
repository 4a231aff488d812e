"""Train everything: `python -m models.tiny_flux.train`, about an hour and a half on one core.

`--stages` runs a part of it, on what `base/` holds already. The result is in `base/` and `adapters/`.
"""

import argparse
import logging
import sys
import time

import torch

from .adapters import RECIPES, train_adapter
from .architecture import BASE, build_pipeline, save_base
from .autoencoder import report_quality, train_autoencoder
from .base import train_base
from .sheet import load_base

STAGES = ("autoencoder", "base", "adapters")
log = logging.getLogger(__name__)


def autoencoder_stage() -> None:
    """Write a base whose autoencoder is trained and whose other weights are random."""
    pipeline = build_pipeline()
    train_autoencoder(pipeline.vae)
    save_base(pipeline)


def base_stage() -> None:
    """Train the transformer and text encoders of `base/` from the start; its autoencoder stays.

    Every 500 steps `base/` gets the weights averaged so far.
    """
    pipeline = build_pipeline()
    pipeline.vae = load_base().vae
    loss = train_base(pipeline, lambda averaged, step: save_base(averaged))
    save_base(pipeline)
    log.info("base: final loss %.4f", loss)


def adapters_stage(styles: list[str]) -> None:
    """Train the adapters of `styles`, or all, on `base/`."""
    pipeline = load_base()
    report_quality(pipeline.vae)
    for recipe in RECIPES:
        if not styles or recipe.style in styles:
            train_adapter(pipeline, recipe)


def main() -> None:
    """Run the stages that the arguments ask for, with their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--styles", nargs="+", default=[], help="adapters to train (default: all)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    torch.set_num_threads(1)  # two threads on a busy machine are slower than one
    for stage in arguments.stages:
        started = time.monotonic()
        if stage == "adapters":
            adapters_stage(arguments.styles)
        else:
            {"autoencoder": autoencoder_stage, "base": base_stage}[stage]()
        log.info("stage %s: %.0f s, written under %s", stage, time.monotonic() - started, BASE.parent)


if __name__ == "__main__":
    main()
