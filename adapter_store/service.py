"""The store as a service of `loraplex.serving`: what is built when it starts, and released when it ends."""

from grpc import aio

from adapter_store.cache import PackedCache
from adapter_store.config import StoreSettings
from adapter_store.download import Limits
from adapter_store.hub import Hub
from adapter_store.layouts import Layouts
from adapter_store.resolve import Resolver
from adapter_store.server import SERVICE_NAME, AdapterStoreServer
from adapter_store.store import Store


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
    cache = PackedCache(settings.cache_dir, settings.cache_bytes)
    return Store(
        resolver=Resolver(hub, cache, settings.local_roots, settings.resolve_ttl_s),
        hub=hub,
        cache=cache,
        limits=Limits(settings.max_file_bytes, settings.download_timeout_s),
        max_rank=settings.max_rank,
        conversions=settings.conversions,
    )
