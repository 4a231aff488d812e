"""The store as a service of `loraplex.serving`: what is built when it starts, and released when it ends."""

from importlib import import_module

from grpc import aio

from adapter_store.cache import PackedCache
from adapter_store.config import StoreSettings
from adapter_store.disk import Disk
from adapter_store.download import Downloader, Limits
from adapter_store.downloads import Downloads
from adapter_store.hub import Hub
from adapter_store.layouts import Layouts
from adapter_store.resolve import Resolver
from adapter_store.server import SERVICE_NAME, AdapterStoreServer
from adapter_store.store import Store
from adapter_store.versions import Urls, Versions


class AdapterStoreService:
    """The adapter store, with everything it needs made from its settings."""

    name = "adapter_store"
    grpc_services: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._store: Store | None = None

    def register(self, server: aio.Server) -> None:
        """Open the cache, and add the servicer."""
        self._store = make_store(self._settings)
        layouts = Layouts(self._settings.cache_dir / "layouts")
        AdapterStoreServer(self._store, layouts, self._settings.local_roots).register(server)

    async def start(self) -> None:
        """Nothing to warm up."""

    async def drain(self) -> None:
        """Nothing is queued: running calls end by themselves."""

    async def close(self) -> None:
        """Stop preparations and close the cache."""
        if self._store is not None:
            await self._store.close()


def make_store(settings: StoreSettings) -> Store:
    """A store as the settings describe it."""
    hub = Hub(timeout_s=settings.hub_timeout_s)
    disk = Disk(settings.cache_dir, settings.min_free_bytes)
    cache = PackedCache(settings.cache_dir, settings.cache_bytes, disk)
    downloads = Downloads(settings.cache_dir / "downloads", settings.download_cache_bytes, disk)
    urls = {kind: Versions(one, cache, settings.resolve_ttl_s) for kind, one in _urls(settings).items()}
    return Store(
        resolver=Resolver(hub, cache, settings.local_roots, settings.resolve_ttl_s, urls=urls),
        hub=Downloader(downloads, {"hub": hub, **urls}),
        cache=cache,
        limits=Limits(settings.max_file_bytes, settings.download_timeout_s),
        max_rank=settings.max_rank,
        conversions=settings.conversions,
        downloads=settings.downloads,
    )


def _urls(settings: StoreSettings) -> dict[str, Urls]:
    """The kinds of URLs that the operator allows."""
    kinds: dict[str, Urls] = {}
    if settings.https_hosts or settings.https_private_hosts:
        https = import_module("adapter_store.https")
        kinds["https"] = https.HttpsHosts(
            settings.https_hosts, settings.https_private_hosts, settings.https_ca_file, settings.hub_timeout_s
        )
    if settings.fsspec_roots:
        kinds["fsspec"] = import_module("adapter_store.object_stores").ObjectStores(settings.fsspec_roots)
    return kinds
