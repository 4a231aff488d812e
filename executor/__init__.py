"""The executor: from a prompt and any mix of adapters to an image, on one warm, compiled base model.

One request: `server` has it checked (`requests`, `adapter_choices`) into a job (`jobs`), `scheduler` admits it,
`input_images` decodes the pictures that it brings along, `adapters` has its packed adapters in host memory by way of
`store_client`, and `engine`, the one thread that owns the device, has them placed (`rows`) and copied in (`arena`) by
`residency`, and runs the job's diffusers pipeline (`pipeline`). What that calls waits in `calls` and shares batches
(`denoiser`, `arguments`) on a model whose layers read the rows (`lora`). What it draws is encoded (`images`,
`image_metadata`) and leaves through an `event_queue` as `messages`.

At start: `pipeline` loads the model and reads its `family` off it, `recipe` changes it, `probe` runs it to find out
which arguments and layers have a row per sample (`fixed_shapes` where prompts would change them), `previews` are
fitted, `compilation` compiles it. `service` starts and ends it all.
"""
