"""The store's settings: one frozen object, read once at start. A field is a flag is an environment variable."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

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
    conversions: int = Field(2, ge=1, le=64)
    """How many files are converted at a time; each holds one packed adapter in memory."""

    @field_validator("local_roots", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """A list of paths from a text: JSON when it looks so, else separated by commas."""
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

    @field_validator("cache_dir")
    @classmethod
    def _resolve_cache_dir(cls, folder: Path) -> Path:
        """An absolute path."""
        return folder.expanduser().resolve()
