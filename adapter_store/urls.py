"""Adapter references that are URLs: `https://host/path/file.safetensors`, `s3://bucket/key.safetensors`, and the like.

What follows a `?` may be a signature: it is kept apart from the name, and no message here quotes it.
"""

import re
from urllib.parse import unquote, urljoin

from loraplex.errors import InvalidAdapterRef

SUFFIX = ".safetensors"
GRAMMAR = "Write `https://host/folder/name.safetensors`, or `s3://bucket/folder/name.safetensors`."
MAX_LENGTH = 4096

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[^/?#]*)(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?")
_HOST = re.compile(
    r"(?=.{1,259}\Z)(?:[a-z0-9_](?:[a-z0-9_-]*[a-z0-9])?)(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*(?::\d{1,5})?"
)
# These have rules of their own: http is not encrypted, and files are what `local_roots` are for.
_REFUSED = {"http": "is not encrypted", "file": "names a local file", "local": "names a local file"}


def is_url(text: str) -> bool:
    """Whether a reference is meant as a URL."""
    return "://" in text


def split_url(text: str) -> tuple[str, str, str]:
    """(scheme, URL without its query, query). Scheme and host are lower case. Raises InvalidAdapterRef."""
    scheme, mark, rest = text.partition("://")
    match = _URL.fullmatch(f"{scheme.lower()}{mark}{rest}")
    is_odd = "::" in text or "\\" in text or text != text.strip() or not text.isprintable()
    if len(text) > MAX_LENGTH or match is None or is_odd:
        raise _invalid("is no URL", text)
    scheme, host, path, query = match["scheme"], match["host"], match["path"] or "", match["query"] or ""
    if scheme in _REFUSED:
        raise _invalid(_REFUSED[scheme], text)
    if "@" in host:
        raise _invalid("holds credentials, which would end up in logs", text)
    if any(part in (".", "..") for part in unquote(path).split("/")):
        raise _invalid("leads out of its folder", text)
    if not path.endswith(SUFFIX):
        raise _invalid(f"names a file that is not {SUFFIX}", text)
    if scheme == "https":
        host = host.lower()
        if not is_host(host) or not text.isascii() or " " in text:
            raise _invalid("has no host name that can be looked up, or holds characters that no URL has", text)
    elif query:
        raise _invalid("has a query, which only https has", text)
    return scheme, f"{scheme}://{host}{path}", query


def host_of(url: str) -> str:
    """The host of a URL that `split_url` gave, with its port where it names one; ":443" is dropped."""
    return url.split("/")[2].removesuffix(":443")


def is_host(text: str) -> bool:
    """Whether a text is a host name, or an IPv4 address, in lower case, perhaps with a port."""
    return _HOST.fullmatch(text) is not None


def is_object_root(text: str) -> bool:
    """Whether a text is a URL of an object store, or the start of one, at a "/"."""
    match = _URL.fullmatch(text)
    is_plain = match is not None and match["query"] is None and match["scheme"] not in {"https", *_REFUSED}
    return is_plain and text.endswith("/") and not {".", ".."} & set(unquote(text).split("/"))


def redirected(url: str, location: str) -> tuple[str, str] | None:
    """(URL without its query, query) of where `url` redirects to; None unless that is plain https."""
    match = _URL.fullmatch(urljoin(url, location.partition("#")[0]))
    if match is None or match["scheme"] != "https" or not is_host(match["host"].lower()):
        return None
    return f"https://{match['host'].lower()}{match['path'] or '/'}", match["query"] or ""


def shown(text: str) -> str:
    """A URL as it may be shown: without credentials and query, and not too long."""
    scheme, mark, rest = text.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"[:100]


def _invalid(what: str, text: str) -> InvalidAdapterRef:
    return InvalidAdapterRef(f"The adapter reference {shown(text)!r} {what}.", field="ref", remedy=GRAMMAR)
