"""The executor's own Prometheus metrics. No label names a tenant's adapter or prompt."""

from prometheus_client import Counter, Gauge, Histogram

_LOAD_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
_FETCH_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60)

QUEUE_LENGTH = Gauge("loraplex_executor_queue_length", "Unfinished requests.")
RUNNING_JOBS = Gauge("loraplex_executor_running_jobs", "Requests whose pipelines run.")
RESIDENTS = Gauge("loraplex_executor_residents", "Adapters in the rank rows.")
FREE_ROWS = Gauge("loraplex_executor_free_rows", "Rank rows that no adapter owns.")
LOADS = Counter("loraplex_executor_loads_total", "Adapters copied into rank rows.")
EVICTIONS = Counter("loraplex_executor_evictions_total", "Adapters evicted from rank rows.")
LOAD_SECONDS = Histogram("loraplex_executor_load_seconds", "Copy into rank rows.", buckets=_LOAD_SECONDS)
FETCH_SECONDS = Histogram(
    "loraplex_executor_fetch_seconds", "Until an adapter is in host memory.", ["source"], buckets=_FETCH_SECONDS
)
STEPS = Counter("loraplex_executor_steps_total", "Denoising steps, one per sample.")
BATCHES = Counter("loraplex_executor_batches_total", "Denoiser calls by batch size.", ["batch_size"])
IMAGES = Counter("loraplex_executor_images_total", "Images made.")
RECOMPILATIONS = Counter("loraplex_executor_recompilations_total", "Graphs compiled after warm-up: always 0.")
