"""What loraplex costs, measured in the same run as diffusers: `python -m benchmarks [NAME ...]`.

- `swap`: changing the adapter, against `load_lora_weights(hotswap=True)`, from host memory, the store, and the rows
- `step`: what the arena adds to one denoiser step
- `start`: cold start and memory of both services, and one Generate request from end to end
- `pack`: from an adapter's file to weights that are ready, time and memory, each side a process of its own
- `prefetch`: many adapters from a hub into the store's cache, and hits on that cache

`models` makes the models and `adapter_files` random adapters for them, `machine` says where it ran and times, `tables`
prints. One thread; every comparison is interleaved, its first pass is discarded, the median counts.
"""
