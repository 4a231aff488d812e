"""What the store counts. No reference, path or digest is ever a label."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)

fetch_seconds = Histogram(
    "loraplex_store_fetch_seconds", "From the call to the last byte of a fetch.", ["source"], buckets=_SECONDS
)
fetch_bytes = Counter("loraplex_store_fetch_bytes", "Packed bytes sent.")
prepare_seconds = Histogram(
    "loraplex_store_prepare_seconds", "To validate, convert and pack one file.", buckets=_SECONDS
)
rejections = Counter("loraplex_store_rejections", "Files refused.", ["cause"])
cache_bytes = Gauge("loraplex_store_cache_bytes", "Packed bytes in the cache.")
cache_entries = Gauge("loraplex_store_cache_entries", "Packed adapters in the cache.")
