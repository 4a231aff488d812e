"""The boundary to the hub: what a repository holds, and its files. Every foreign error becomes one of ours here.

huggingface_hub reads the token, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE from the environment. Its cache
on the disk is only read. No message of ours quotes one of its: they name URLs. All methods block; any thread.
"""

import contextlib
import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import (
    HfApi,
    get_hf_file_metadata,
    get_session,
    hf_hub_url,
    hf_raise_for_status,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
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
from huggingface_hub.utils import build_hf_headers

from adapter_store.ranges import Response, body_of, range_headers
from adapter_store.source import Source
from adapter_store.transfer import Body, BrokenOff
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

    def local_copy(self, source: Source, name: str) -> Path | None:
        """The file in the library's own cache, which is only read here."""
        found = try_to_load_from_cache(source.ref.name, name, cache_dir=self._cache_dir, revision=source.commit)
        return Path(found) if isinstance(found, str) else None

    def remote_file(self, source: Source, name: str) -> "HubDownload":
        """A file of a commit, to be opened."""
        return HubDownload(source.ref.name, source.commit, name, self._endpoint, self._timeout_s)


def fetch_configs(repo: str, endpoint: str | None = None, cache_dir: Path | None = None) -> Path:
    """A local folder with the configs of a diffusers repository, and nothing else of it. Blocking.

    Endpoint and cache are the library's own defaults when None; without a hub, what the cache has is used. Raises what
    `Hub.list` raises.
    """
    patterns = ["model_index.json", "*/config.json"]
    with _our_errors(repo, ""):
        return Path(snapshot_download(repo, allow_patterns=patterns, endpoint=endpoint, cache_dir=cache_dir))


@dataclass(frozen=True)
class HubDownload:
    """One file of one commit.

    The library finds it and says what is wrong; its own download could neither go on in a later call, nor be stopped
    while a server sends a byte at a time.
    """

    repo: str
    commit: str
    name: str
    endpoint: str | None
    timeout_s: float

    @contextmanager
    def open(self, start: int) -> Iterator[Body]:
        """The bytes from `start` on. The token goes to the hub only, not to the place that it sends us to."""
        with _our_errors(self.repo, self.commit, self.name), contextlib.ExitStack() as stack:
            url = hf_hub_url(self.repo, self.name, revision=self.commit, endpoint=self.endpoint)
            found = get_hf_file_metadata(url, timeout=self.timeout_s, endpoint=self.endpoint)
            headers = build_hf_headers()
            if _origin(found.location) != _origin(url):
                headers.pop("authorization", None)
            headers |= range_headers(start)
            request = get_session().stream("GET", found.location, headers=headers, timeout=self.timeout_s)
            response = stack.enter_context(request)
            if response.status_code != 416:
                hf_raise_for_status(response)
            body = body_of(response, start, self._chunks(response))
            leave = stack.pop_all()
        with leave:
            yield body

    def _chunks(self, response: Response) -> Iterator[bytes]:
        with _our_errors(self.repo, self.commit, self.name):
            yield from response.iter_raw()


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


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
    return BrokenOff(f"The hub {what}.", remedy="Try again later.", retry_after_s=_RETRY_AFTER_S)


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
