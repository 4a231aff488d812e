"""The adapter store: from the name of a LoRA adapter to verified, packed bytes.

The files in the order in which a request meets them:

- `__main__`, `config`, `service`: the process. `server`, `wire`: the five calls, proto <-> domain.
- `refs`: what a user writes. `layouts`: the registered layouts.
- `store`: the steps below as one function, once per key (`flights`).
- `resolve`: 1 name -> commit and file. `download`: 2 commit -> file on disk. `hub` is the boundary of both.
- `validate`: 3 file -> raw tensors; `header` checks what it says, `signatures` names what is no such file. `dtypes`
  reads and writes the numbers. `fitting`: 3 to 6 as one function.
- `groups`, `sizes`, `scaling`, `convert`, `placing`: 4 any trainer's keys -> the layout's modules, through the tables
  in `dialects`. `options`, `waivers`: what the caller allows. `accounting`: what becomes of every tensor.
- `algebra`: 5 what a file stores -> A and B, of no more ranks than allowed. `pack`: 6 rank rows, one file.
- `cache`: 7 packed files by key (`keys`); `entries` decides what is evicted, `rebuild` reads an entry off its file.
- `inspection`, `listing`: the reports. `errors`: every cause of refusal. `metrics`: what is counted.
"""
