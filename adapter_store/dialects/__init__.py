"""How trainers name the tensors of a LoRA file: one table per file.

A key is prefix + module name + suffix, and the three are independent: `suffixes` tells the algorithm and the part,
`prefixes` the component, `names` the module.

- `families`: which tables belong to a base model. `original` is the shape of a table, `targets` what it leads to.
- `flux`, `flux2`, `sd3`, `sgm`, `z_image`, `wan`, `hunyuan_video`, `ltx`: the names of the code that a base model
  comes from. `encoders`: the spellings of text encoders.
- `recognise` guesses the family of a foreign file, for messages only.
"""
