"""What loraplex costs, measured in the same run as diffusers: `python -m benchmarks [swap|step|start|prefetch ...]`.

- `swap`: changing the adapter, against `load_lora_weights(hotswap=True)`, from host memory, the store, and the rows
- `step`: what the arena adds to one denoiser step
- `start`: cold start and memory of both services, and one Generate request from end to end
- `prefetch`: many adapters from a hub into the store's cache, and hits on that cache

`models` makes the models and `adapter_files` random adapters for them, `machine` says where it ran and times, `tables`
prints. One process, one thread; every comparison is interleaved, its first pass is discarded, the median counts.
"""
