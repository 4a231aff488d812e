"""What the tables of docs/reference.md say beside what the code itself knows: when an error happens, and what to do.

A new error reason or cause of refusal needs its sentence here; `python -m docs.reference` says which is missing.
"""

# reason -> (when it happens, who can do what about it, whether the same request may succeed later)
REASONS: dict[str, tuple[str, str, str]] = {
    "INVALID_REQUEST": (
        "A field of the request is wrong or does not go with another, or the base model cannot do it; also a message "
        "above 96 MiB.",
        "Caller: correct the field that BadRequest names. GetModel tells the limits.",
        "no",
    ),
    "UNKNOWN_LAYOUT": (
        "The store was asked for a layout digest that nobody registered in its cache_dir. Executors register again by "
        "themselves.",
        "Caller of the store: RegisterLayout first.",
        "after RegisterLayout",
    ),
    "INVALID_ADAPTER_REF": (
        "The reference cannot be read, leaves the local roots, or names a host or bucket that is not allowed.",
        "Caller: write it as the remedy says. Operator: local_roots, https_hosts, fsspec_roots.",
        "no",
    ),
    "ADAPTER_NOT_FOUND": (
        "No such repository, revision, file or local name; also a private one that the store's token cannot see.",
        "Caller: check the name. Operator: HF_TOKEN, local_roots.",
        "no",
    ),
    "AMBIGUOUS_ADAPTER": (
        "The repository or folder holds several .safetensors files.",
        "Caller: name one of those that the message lists, as in `org/name:file.safetensors`.",
        "no",
    ),
    "ADAPTER_ACCESS_DENIED": (
        "The repository is gated or disabled, the token is not valid, or a web server says 401 or 403.",
        "Operator: accept the licence with the account of HF_TOKEN, or renew the token.",
        "no",
    ),
    "ADAPTER_REJECTED": (
        "The file cannot be applied exactly. The metadata `cause` and `key` say why.",
        "Caller: see [causes](#causes-of-a-refusal) and [formats.md](formats.md).",
        "no",
    ),
    "SOURCE_UNAVAILABLE": (
        "The hub or web server cannot be reached, is busy, broke off, or took longer than download_timeout_s, and the "
        "adapter is not in the cache; or a local file changed while it was read.",
        "Wait. A download goes on where it stopped. Operator: look at the network, HF_ENDPOINT, HF_HUB_OFFLINE.",
        "yes",
    ),
    "STORE_UNAVAILABLE": (
        "The executor cannot reach its store, a fetch took longer than fetch_timeout_s, or the store failed; in the "
        "store itself: another process holds the index of the cache.",
        "Operator: look at the store's health and log.",
        "yes",
    ),
    "STORAGE_EXHAUSTED": (
        "The disk of cache_dir is full, or a packed adapter is larger than cache_bytes or min_free_bytes allow.",
        "Operator: free space, or raise cache_bytes.",
        "when the operator made room",
    ),
    "CORRUPT_ADAPTER": (
        "The bytes that reached the executor do not have the size, layout or sha256 that the store promised.",
        "Wait. Operator: if it repeats, suspect the network or the disk; run verify-cache.",
        "yes",
    ),
    "TOO_MANY_ROWS": (
        "The ranks of the adapters add up to more than rows_per_sample in one step, or than arena_rows in all.",
        "Caller: fewer or smaller adapters. Operator: more rows_per_sample or arena_rows.",
        "no",
    ),
    "NON_FINITE_OUTPUT": (
        "The model computed NaN or Inf with these adapters: too strong, or a training that failed. No image is sent.",
        "Caller: lower the strengths, or leave an adapter out.",
        "no",
    ),
    "QUEUE_FULL": (
        "The executor has max_queue_length unfinished requests.",
        "Caller: come back after RetryInfo, or ask another executor. Operator: more executors.",
        "yes",
    ),
    "SHUTTING_DOWN": ("The service drains after SIGTERM.", "Caller: ask another replica.", "yes"),
    "DEADLINE_EXCEEDED": (
        "The deadline of the call passed, or cannot be met any more: steps left times the shortest step ever seen.",
        "Caller: allow more time, or ask for fewer steps.",
        "with more time",
    ),
    "CANCELLED": ("The caller, or Cancel with the request's id, ended it.", "Nothing.", "-"),
    "SERVICE_UNAVAILABLE": (
        "The service is not reached, or is still warming up. Client libraries make this one, too.",
        "Wait for its health. Operator: look whether it runs.",
        "yes",
    ),
    "INTERNAL": (
        "A fault of the service: out of device memory, a disk that cannot be read, a bug.",
        "Operator: search the log for the request id; there is a traceback.",
        "perhaps once",
    ),
}

# cause -> when a file is refused with it
CAUSES: dict[str, str] = {
    "EMPTY_FILE": "It has no bytes.",
    "HTML_PAGE": "It is a web page: an error or a login page was saved under the adapter's name.",
    "LFS_POINTER": "It is the pointer that git keeps instead of a large file.",
    "PICKLE": "It is a Python pickle, as in `.pt`, `.bin`, `.ckpt`.",
    "ARCHIVE": "It is a zip, gzip or tar archive; PyTorch's newer checkpoints are zip archives.",
    "GGUF": "It is a GGUF file.",
    "NOT_SAFETENSORS": "It does not begin as safetensors do.",
    "NOT_PACKED": "`unpack` was given a file that is no packed adapter.",
    "TRUNCATED": "It ends before its header or its last tensor does, or was cut short while it was read.",
    "TRAILING_BYTES": "It goes on after its last tensor.",
    "FILE_TOO_LARGE": "It is larger than max_file_bytes.",
    "HEADER_TOO_LARGE": "Its header is larger than 32 MiB.",
    "HEADER_INVALID": "Its header is no JSON object as the format defines it, or names more than 100,000 tensors.",
    "DUPLICATE_KEY": "Its header names a tensor twice.",
    "NO_TENSORS": "It holds no tensor, or nothing to apply once zeros and waived parts are left out.",
    "DTYPE_UNSUPPORTED": "A tensor is none of F64, F32, F16, BF16, F8_E4M3, F8_E5M2; an alpha may be an integer.",
    "SHAPE_INVALID": "A tensor has no dimension, more than four, or one of size 0.",
    "OFFSETS_INVALID": "Tensors overlap, leave holes, or have another size than their shape says.",
    "UNKNOWN_KEY": "The end of a key is none that belongs to a known algorithm.",
    "UNKNOWN_MODULE": "A key names no module of this base model: mostly an adapter for another one.",
    "AMBIGUOUS_MODULE": "A key could mean several modules: underscored names that look alike.",
    "AMBIGUOUS_COMPONENT": "The base has two denoisers, and neither the file nor `PackOptions.denoiser` says which.",
    "COMPONENT_NOT_SERVED": "A key belongs to a component that this layout does not have, and is not all zero.",
    "UNSUPPORTED_ALGORITHM": "DoRA, OFT, BOFT, GLoRA, IA3, VeRA, full weights, norms that are trained, and the like.",
    "BIAS_DIFFERENCE": "It changes a bias, and not by zero.",
    "CONTROL_LORA": "It needs a wider input layer or replaces weights: a control LoRA, ControlNet-LLLite.",
    "TEXTUAL_INVERSION": "It bundles embeddings of new tokens.",
    "DUPLICATE_MODULE": "It adapts a module twice, differently.",
    "INCOMPLETE_PAIR": "A module lacks one of its matrices, or an alpha stands alone.",
    "RANK_MISMATCH": "A and B, or other factors of one module, have different ranks.",
    "SHAPE_MISMATCH": "A matrix does not fit the module: an adapter for another size of model, or transposed.",
    "RANK_TOO_LARGE": "A module needs more ranks than max_rank, and a cut was not allowed or would cost too much.",
    "ALPHA_INVALID": "An alpha is zero, negative, not finite, more than one number, or beside a full difference.",
    "ALPHA_CONFLICT": "The alpha tensor and peft's metadata say different things, or the noted rank is another one.",
    "METADATA_INVALID": "peft's metadata or adapter_config.json cannot be read, or has a pattern that matches nothing.",
    "NOT_FINITE": "A tensor holds NaN or Inf.",
    "OVERFLOW": "A number becomes Inf in the dtype of the layout, or in the product of its factors.",
    "UNDERFLOW": "More than 1 % of the numbers become zero in the dtype of the layout.",
}
