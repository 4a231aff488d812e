"""How trainers name the tensors of a LoRA file: one table per file.

A key is prefix + module name + suffix, and the three are independent: `suffixes` tells the algorithm and the part,
`prefixes` the component, `names` the module; `flux` adds the names of the original FLUX.1 code. `recognise` guesses the
family of a foreign file, for messages only.
"""
