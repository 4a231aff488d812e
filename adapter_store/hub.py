"""The boundary to the hub: what a repository holds, and its files. Every foreign error becomes one of ours here.

huggingface_hub reads the token, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE from the environment. No message of ours quotes
one of its: they name URLs. All methods block; any thread.
"""

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, scan_cache_dir
from huggingface_hub.errors import (
    CacheNotFound,
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from loraplex.errors import (
    AdapterAccessDenied,
    AdapterNotFound,
    InvalidAdapterRef,
    ServiceError,
    SourceUnavailable,
    StorageExhausted,
)

# Their lines name repositories, which are the tenants' own business.
for _library in ("httpx", "httpx2", "httpcore", "huggingface_hub"):
    logging.getLogger(_library).setLevel(logging.CRITICAL)

# The base of all errors of the library's HTTP client, whichever client that is.
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_RETRY_AFTER_S = 10.0


@dataclass(frozen=True)
class HubFile:
    """One file of a repository; `sha256` is "" where the hub does not tell."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Listing:
    """What a revision of a repository holds."""

    commit: str
    files: dict[str, HubFile]


class Hub:
    """A hub. `endpoint` and `cache_dir` are the library's own defaults when None."""

    def __init__(self, endpoint: str | None = None, cache_dir: Path | None = None, timeout_s: float = 10.0) -> None:
        self._endpoint, self._cache_dir, self._timeout_s = endpoint, cache_dir, timeout_s
        self._api = HfApi(endpoint=endpoint)

    def list(self, repo: str, revision: str) -> Listing:
        """The commit and the files of `revision` ("" for the default branch), by one request."""
        with _our_errors(repo, revision):
            found = self._api.model_info(repo, revision=revision or None, files_metadata=True, timeout=self._timeout_s)
        files = {
            file.rfilename: HubFile(file.size or 0, file.lfs.sha256 if file.lfs else "")
            for file in found.siblings or ()
        }
        return Listing(str(found.sha), files)

    def list_cached(self, repo: str, revision: str) -> Listing | None:
        """The same from the library's own cache on disk, for times without a hub."""
        try:
            repos = scan_cache_dir(self._cache_dir).repos
        except (CacheNotFound, OSError):
            return None
        for cached in repos:
            for snapshot in cached.revisions if cached.repo_id == repo and cached.repo_type == "model" else ():
                if (revision or "main") in {*snapshot.refs, snapshot.commit_hash}:
                    files = {
                        file.file_path.relative_to(snapshot.snapshot_path).as_posix(): HubFile(file.size_on_disk, "")
                        for file in snapshot.files
                    }
                    return Listing(snapshot.commit_hash, files)
        return None

    def download(self, repo: str, commit: str, name: str, report: Callable[[int], None], again: bool = False) -> Path:
        """Bring one file to the disk; `report` gets the bytes received so far, and may raise to stop."""

        class Progress:
            """As much of a tqdm bar as the library calls."""

            def __init__(self, *_: Any, **__: Any) -> None:
                self._received = 0  # the library may show one file in two bars

            def __enter__(self) -> "Progress":
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def update(self, size_bytes: float | None = 1) -> None:
                self._received += int(size_bytes or 0)
                report(self._received)

            def __getattr__(self, _: str) -> Callable[..., None]:
                return lambda *_args, **_kwargs: None

        with _our_errors(repo, commit, name):
            return Path(
                hf_hub_download(
                    repo,
                    name,
                    revision=commit,
                    endpoint=self._endpoint,
                    cache_dir=self._cache_dir,
                    etag_timeout=self._timeout_s,
                    tqdm_class=Progress,
                    force_download=again,
                )
            )


@contextmanager
def _our_errors(repo: str, revision: str, name: str = "") -> Iterator[None]:
    try:
        yield
    except HFValidationError:
        raise InvalidAdapterRef(f"{repo!r} is no repository name.", field="ref") from None
    except (_HTTP_ERROR, OSError, EntryNotFoundError) as error:
        raise _translated(error, repo, revision, name) from None


def _translated(error: Exception, repo: str, revision: str, name: str) -> Exception:
    if isinstance(error, ServiceError):
        return error
    return _answered(error, repo, revision, name) or _not_answered(error, repo)


def _answered(error: Exception, repo: str, revision: str, name: str) -> ServiceError | None:
    """The error for what the hub said of the repository; None when it said nothing."""
    if isinstance(error, GatedRepoError):
        return _denied(repo, "is gated", "Accept its licence on the hub with the account of the store's token.")
    if isinstance(error, RevisionNotFoundError):
        return _missing(f"The repository {repo!r} has no revision {revision!r}.", "revision", "Name one that it has.")
    if isinstance(error, DisabledRepoError):
        return _denied(repo, "was disabled by the hub", "Use another repository.")
    if isinstance(error, RepositoryNotFoundError):
        remedy = "Check the name. If the repository is private, give the store a token that may read it (HF_TOKEN)."
        return _missing(f"The hub has no repository {repo!r}, or hides it.", "repository", remedy)
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return _missing(f"The repository {repo!r} has no file {name!r}.", "file", "Name one that it has.")
    status = _status(error)
    if status == 401:
        return _denied(repo, "needs a valid token", "Set or renew the store's HF_TOKEN.")
    if status == 403:
        return _denied(repo, "may not be read with the store's token", "Give the store a token that may read it.")
    return None


def _not_answered(error: Exception, repo: str) -> Exception:
    if isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled):
        remedy = "Download it before going offline, or start the store without HF_HUB_OFFLINE."
        return SourceUnavailable(f"The store is offline and {repo!r} is not in its cache.", remedy=remedy)
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StorageExhausted("The store's disk is full.", remedy="Free space on the store's disk.")
    if number is not None and not isinstance(error, ConnectionError):
        return error
    status = _status(error)
    what = f"answered with status {status}" if status else "cannot be reached, or broke off"
    return SourceUnavailable(f"The hub {what}.", remedy="Try again later.", retry_after_s=_RETRY_AFTER_S)


def _status(error: Exception) -> int | None:
    """The HTTP status behind an error, also when the library wrapped it in its own."""
    for one in (error, error.__cause__):
        if isinstance(one, HfHubHTTPError) and one.response is not None:
            return one.response.status_code
    return None


def _missing(message: str, what: str, remedy: str) -> AdapterNotFound:
    return AdapterNotFound(message, remedy=remedy, field="ref", metadata={"missing": what})


def _denied(repo: str, what: str, remedy: str) -> AdapterAccessDenied:
    return AdapterAccessDenied(f"The repository {repo!r} {what}.", remedy=remedy)
