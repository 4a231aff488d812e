"""The executor: from a prompt and any mix of adapters to an image, on one warm, compiled base model.

One request: `server` has it checked (`requests`, `adapter_choices`) into a job (`jobs`), `scheduler` admits it,
`input_images` decodes the pictures that it brings along, `adapters` has its packed adapters in host memory by way of
`store_client`, and `engine`, the one thread that owns the device, has them placed (`rows`) and copied in (`arena`) by
`residency`, and runs the job's diffusers pipeline (`pipeline`). What that calls waits in `calls` and shares batches
(`denoiser`) on a model whose layers read the rows (`lora`). What it draws is encoded (`images`, `image_metadata`) and
leaves through an `event_queue` as `messages`. `service` starts and ends it all.
"""
