"""Addresses as settings name them: host:port, checked before anything starts; and why one cannot be listened on."""

import re
import socket

_HOST = re.compile(r"\[[0-9A-Fa-f:.%a-z]+\]|[^\s:/\[\]]+")
_MAX_PORT = 65_535
_SCHEMES = ("unix:", "dns:", "ipv4:", "ipv6:")


def check_listen(text: str, *, unix: bool = False) -> str:
    """`text` when a server can be told to listen on it: host:port, port 0 for a free one; with `unix` also unix:path.

    ValueError says what is wrong.
    """
    if unix and text.startswith("unix:") and len(text) > len("unix:"):
        return text
    split(text)
    return text


def check_target(text: str) -> str:
    """`text` when a service can be called there: host:port, or one of gRPC's URIs. ValueError says what is wrong."""
    if text.startswith(_SCHEMES):
        return text
    if split(text)[1] == 0:
        raise ValueError(f"port 0 names no service, got {text!r}")
    return text


def split(text: str) -> tuple[str, int]:
    """The host, without brackets, and the port of host:port. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not (colon and _HOST.fullmatch(host)):
        raise ValueError(f"an address is host:port, as in 127.0.0.1:50051 or [::1]:50051, got {text!r}")
    if not (port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        raise ValueError(f"a port is 0 to {_MAX_PORT}, got {text!r}")
    return host.strip("[]"), int(port)


def why_not(listen: str) -> str:
    """Why a server cannot listen on host:port now, in the system's words; empty when it can."""
    host, port = split(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""
