"""The store's settings: one frozen object, read once at start. A field is a flag is an environment variable."""

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from adapter_store.urls import is_host, is_object_root
from loraplex.serving import ServingSettings

_GIB = 1 << 30


class StoreSettings(ServingSettings):
    """Where adapters come from, where packed ones are kept, and what is refused."""

    model_config = SettingsConfigDict(env_prefix="LORAPLEX_STORE_")

    listen: str = "127.0.0.1:50051"
    """Address of the gRPC server, host:port."""
    metrics_listen: str = "127.0.0.1:9451"
    """Address of the Prometheus metrics, host:port."""
    cache_dir: Path = Path("~/.cache/loraplex/store")
    """Folder of packed adapters and registered layouts; on a local disk."""
    cache_bytes: int = Field(50 * _GIB, ge=1)
    """Packed adapters may take this much; the least recently used are evicted."""
    local_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    """Folders whose .safetensors files may be asked for by name; separated by commas, or a JSON list."""
    https_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Web servers whose .safetensors files may be asked for as https://host/path, as `host` or `host:port`; also those
    that they redirect to. None by default."""
    https_private_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Further ones, which may have addresses of a private network or of this machine."""
    https_ca_file: Path | None = None
    """Certificates, as PEM, to trust beside those of the system."""
    fsspec_roots: Annotated[tuple[str, ...], NoDecode] = ()
    """URLs below which files of object stores may be asked for, as in s3://bucket/folder; none by default. Needs the
    extra `fsspec`, and the backend of the store."""
    download_cache_bytes: int = Field(10 * _GIB, ge=0)
    """Downloaded files may take this much beside those in use; the least recently used are removed. 0 keeps none."""
    min_free_bytes: int = Field(1 * _GIB, ge=0)
    """This much stays free on the disk of cache_dir: what was used least is removed, or new adapters are refused."""
    max_file_bytes: int = Field(8 * _GIB, ge=1)
    """Adapter files larger than this are refused."""
    max_rank: int = Field(128, ge=1)
    """Adapters of a larger rank are refused."""
    resolve_ttl_s: float = Field(60.0, ge=0, allow_inf_nan=False)
    """A branch of a repository is looked up again after this many seconds."""
    hub_timeout_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    """How long one look-up on the hub may take."""
    download_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """How long one download may take."""
    downloads: int = Field(16, ge=1, le=256)
    """How many references are resolved or downloaded at a time."""
    conversions: int = Field(2, ge=1, le=64)
    """How many files are converted at a time; each holds one packed adapter in memory."""

    @field_validator("local_roots", "https_hosts", "https_private_hosts", "fsspec_roots", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """A list from a text: JSON when it looks so, else separated by commas."""
        if isinstance(value, list):  # a flag that was given several times
            return [path for part in value for path in cls._split(part)]
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [part.strip() for part in value.split(",") if part.strip()]

    @field_validator("local_roots")
    @classmethod
    def _resolve_roots(cls, roots: tuple[Path, ...]) -> tuple[Path, ...]:
        """Absolute paths of folders that exist."""
        resolved = tuple(root.expanduser().resolve() for root in roots)
        for root in resolved:
            if not root.is_dir():
                raise ValueError(f"{root} is no folder")
        return resolved

    @field_validator("https_hosts", "https_private_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        """Host names in lower case, without the usual port."""
        hosts = tuple(host.lower().removesuffix(":443") for host in hosts)
        for host in hosts:
            if not is_host(host):
                raise ValueError(f"{host!r} is no `host` or `host:port`")
        return hosts

    @field_validator("https_ca_file")
    @classmethod
    def _check_ca_file(cls, file: Path | None) -> Path | None:
        """A file that exists."""
        if file is not None and not file.expanduser().is_file():
            raise ValueError(f"{file} is no file")
        return file.expanduser() if file else None

    @field_validator("fsspec_roots")
    @classmethod
    def _check_fsspec_roots(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        """URLs that end in "/", so that s3://a does not allow s3://ab; their backends are installed."""
        roots = tuple(f"{root.rstrip('/')}/" if not root.endswith("://") else root for root in roots)
        for root in roots:
            if not is_object_root(root):
                raise ValueError(f"{root!r} is no URL of an object store, as in s3://bucket/folder")
        try:
            if roots:
                import_module("adapter_store.object_stores").ObjectStores(roots)
        except ImportError as error:
            raise ValueError(f"a backend is missing: {error}") from error
        return roots

    @field_validator("cache_dir")
    @classmethod
    def _resolve_cache_dir(cls, folder: Path) -> Path:
        """An absolute path."""
        return folder.expanduser().resolve()
