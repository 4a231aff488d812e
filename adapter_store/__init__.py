"""The adapter store: from the name of a LoRA adapter to verified, packed bytes.

The files in the order in which a request meets them: `server` (proto <-> domain), `refs` (what a user writes), `store`
(the steps, once per key), `resolve` (name -> commit and file; `hub` is the boundary to the hub), `download`,
`validate` (a file -> raw tensors; `dtypes` reads and writes their numbers), `convert` (any trainer's keys -> the
layout's modules, through the tables in `dialects`), `algebra` (pairs -> A and scaled B), `pack` (rank rows, one file),
`cache` (packed files by key; `entries` decides what is evicted), `layouts` (registered layouts on disk).
"""
