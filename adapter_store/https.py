"""The boundary to web servers: files under `https://` on hosts that the operator allows.

Only https, only those hosts, also after a redirect, and only addresses that such a host may have: a name is looked up
once per request, all its addresses are checked, and the connection goes to a checked one. No proxy, cookie or
credential is used. No message here quotes a query. All methods block; any thread.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

try:
    import httpx2 as httpx
except ImportError:  # huggingface_hub before 2 brings the client under its old name
    import httpx  # type: ignore[no-redef]

from adapter_store.addresses import is_allowed
from adapter_store.ranges import body_of, range_headers, size_of
from adapter_store.refs import AdapterRef
from adapter_store.source import Version
from adapter_store.transfer import Body, BrokenOff
from adapter_store.urls import host_of, redirected
from adapter_store.versions import Changed
from loraplex.errors import (
    AdapterAccessDenied,
    AdapterNotFound,
    InvalidAdapterRef,
    ServiceError,
    SourceUnavailable,
)

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_SETTLED = timedelta(seconds=2)
_ASK_THE_OPERATOR = "Ask the operator to add the host to https_hosts."


def look_up(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system finds them."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class HttpsHosts:
    """The hosts that the operator allows, as `host` or `host:port`; only `private_hosts` may have private addresses."""

    def __init__(
        self,
        hosts: tuple[str, ...],
        private_hosts: tuple[str, ...] = (),
        ca_file: Path | None = None,
        timeout_s: float = 10.0,
        look_up: Callable[[str, int], list[str]] = look_up,
    ) -> None:
        self._hosts, self._private_hosts, self._look_up = {*hosts, *private_hosts}, set(private_hosts), look_up
        context = ssl.create_default_context()
        if ca_file is not None:
            context.load_verify_locations(ca_file)
        # A kept connection could be used for another host of the same address.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(verify=context, trust_env=False, timeout=timeout_s, limits=limits)

    def close(self) -> None:
        """Close what is open."""
        self._client.close()

    def look(self, ref: AdapterRef, before: Version | None) -> Version:
        """What the URL holds now, by a request for its first byte; `before` itself when that is unchanged."""
        headers = range_headers(0) | {"Range": "bytes=0-0"}
        if before and before.etag:
            headers["If-None-Match"] = before.etag
        elif before and before.modified:
            headers["If-Modified-Since"] = before.modified
        with self._answer(ref, headers, (304, 416)) as response:
            if response.status_code == 304 and before is not None:
                return before
            version = _version(response)
            return before if before == version and before.identity else version

    @contextmanager
    def open(self, ref: AdapterRef, version: Version, start: int) -> Iterator[Body]:
        """The bytes of `version` from `start` on. Raises Changed when the URL holds another one."""
        with self._answer(ref, range_headers(start, version.validator), (416,)) as response:
            if response.status_code != 416 and _is_other(response, version):
                raise Changed("The file was changed at its source.", remedy="Ask again.", retry_after_s=1.0)
            yield body_of(response, start, _chunks(response))

    @contextmanager
    def _answer(self, ref: AdapterRef, headers: dict[str, str], also: tuple[int, ...]) -> Iterator[Any]:
        """The answer to a GET, after redirects: a success, or one of the statuses `also`."""
        url, query = ref.name, ref.query
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._send(url, query, headers)
            with contextlib.closing(response):
                if response.status_code not in _REDIRECTS:
                    if response.status_code not in (200, 206, *also):
                        raise _refusal(response.status_code)
                    yield response
                    return
                target = redirected(url, response.headers.get("location", ""))
            if target is None:
                message = "The source redirects to an address that is not https."
                raise InvalidAdapterRef(message, field="ref", remedy="Use an address that leads there by https.")
            url, query = target
        raise SourceUnavailable("The source redirects too often.", remedy="Use the address that it leads to.")

    def _send(self, url: str, query: str, headers: dict[str, str]) -> Any:
        host = host_of(url)
        if host not in self._hosts:
            message = f"The host {host!r} is not one that this store may read from."
            raise InvalidAdapterRef(message, field="ref", remedy=_ASK_THE_OPERATOR)
        name, _, port = host.partition(":")
        path = url.split("/", 3)[3]
        address = self._address(name, int(port or 443), host in self._private_hosts)
        netloc = f"[{address}]" if ":" in address else address
        with _our_errors():
            request = self._client.build_request(
                "GET",
                f"https://{netloc}:{port or 443}/{path}{'?' if query else ''}{query}",
                headers={**headers, "Host": host, "User-Agent": "loraplex"},
                extensions={"sni_hostname": name},
            )
            return self._client.send(request, stream=True, follow_redirects=False)

    def _address(self, name: str, port: int, may_be_private: bool) -> str:
        try:
            addresses = self._look_up(name, port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            message = f"The host {name!r} cannot be found."
            raise SourceUnavailable(message, remedy="Check the name, or try again later.", retry_after_s=10.0)
        if not all(is_allowed(address, may_be_private) for address in addresses):
            remedy = "Ask the operator to add it to https_private_hosts, if it is meant to be read."
            raise InvalidAdapterRef(f"The host {name!r} is not on the public network.", field="ref", remedy=remedy)
        return addresses[0]


def _version(response: Any) -> Version:
    modified = response.headers.get("last-modified", "")
    if modified and not _is_settled(modified, response.headers.get("date", "")):
        modified = ""
    return Version(size_of(response) or 0, response.headers.get("etag", ""), modified)


def _is_other(response: Any, version: Version) -> bool:
    """Whether an answer says that it is about another version. A partial one may leave out what it was asked with."""
    etag, modified = response.headers.get("etag", ""), response.headers.get("last-modified", "")
    if version.etag and etag:
        return bool(version.etag != etag)
    return bool(version.modified and modified and version.modified != modified)


def _is_settled(modified: str, date: str) -> bool:
    """Whether a second change within the same second can be ruled out."""
    try:
        return parsedate_to_datetime(date) - parsedate_to_datetime(modified) >= _SETTLED
    except (TypeError, ValueError):
        return False


def _chunks(response: Any) -> Iterator[bytes]:
    with _our_errors():
        yield from response.iter_raw()


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            remedy = "If the host has a private certificate, ask the operator to name its CA in https_ca_file."
            raise SourceUnavailable("The certificate of the host is not valid here.", remedy=remedy) from None
        message = "The source cannot be reached, or broke off."
        raise BrokenOff(message, remedy="Try again later.", retry_after_s=10.0) from None


def _refusal(status: int) -> ServiceError:
    if status in (401, 402, 403, 407):
        message = f"The source refuses the file (status {status})."
        return AdapterAccessDenied(message, remedy="Use a public address, or a signed one that has not expired.")
    if status in (404, 410):
        message = f"The source has no such file (status {status})."
        return AdapterNotFound(message, field="ref", remedy="Check the address.", metadata={"missing": "file"})
    message = f"The source answered with status {status}."
    kind = BrokenOff if status in _BUSY else SourceUnavailable
    return kind(message, remedy="Try again later.", retry_after_s=10.0)
