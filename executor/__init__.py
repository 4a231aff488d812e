"""The executor: from a prompt and any mix of adapters to an image, on one warm, compiled base model.

One request: `server` has it checked (`requests`) into a job (`jobs`), `scheduler` admits it, `adapters` has its packed
adapters in host memory by way of `store_client`, and `engine`, the one thread that owns the device, has them placed
(`rows`) and copied in (`arena`) by `residency`, and runs the job's diffusers pipeline (`pipeline`). What that calls
waits in `calls` and shares batches (`denoiser`) on a model whose layers read the rows (`lora`). `service` starts and
ends it all.
"""
