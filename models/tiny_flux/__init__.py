"""tiny-flux: a complete, very small Flux pipeline and its adapters, trained here on one CPU core.

In the order in which training uses them:

vocabulary    the words that a prompt may use, and all prompts made of them
rendering     a prompt becomes a picture of 64 x 64 px
styles        a picture becomes the same picture in another style
architecture  the untrained pipeline, and how it is written to `base/`
muon          the optimizer
autoencoder   stage 1: pictures to latents and back
base          stage 2: transformer and text encoders
adapters      stage 3: one LoRA per style
adapter_files a trained LoRA becomes a file in the naming of one trainer
train         runs the three stages
sheet         draws contact sheets for looking at
"""
