"""A web server on loopback, with or without TLS, that serves one file and can misbehave in every way that is known."""

import contextlib
import hashlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class FileServer:
    """What it serves, how, and the requests so far: (path, Range, If-Range, If-None-Match).

    `misbehave` lists one way per request of a body, used up from the front.
    """

    port: int = 0
    content: bytes = b""
    etag: str | None = None
    modified_s: float | None = None
    has_ranges: bool = True
    has_length: bool = True
    status: int = 200
    redirect_to: str = ""
    misbehave: list[str] = field(default_factory=list)
    always: str = ""
    requests: list[tuple[str, str, str, str]] = field(default_factory=list)

    def url(self, host: str = "files.test") -> str:
        """The address of the file."""
        return f"https://{host}:{self.port}/loras/a.safetensors"

    def bodies(self) -> list[str]:
        """The ranges that were asked for, without the look-ups of a first byte."""
        return [asked for _, asked, _, _ in self.requests if asked != "bytes=0-0"]

    def tag(self) -> str:
        """The ETag of the content."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"' if self.etag is None else self.etag


def make_certificate(folder: Path, *names: str) -> tuple[Path, Path]:
    """A certificate of its own authority, and its key."""
    certificate, key = folder / "ca.pem", folder / "key.pem"
    alternatives = ",".join(f"DNS:{name}" for name in names)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3650", "-subj", "/CN=loopback"]
    command += ["-addext", f"subjectAltName={alternatives}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key


@contextmanager
def file_server(certificate: tuple[Path, Path] | None = None) -> Iterator[FileServer]:
    """Serve until the block is left."""
    served, stop = FileServer(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            asked = self.headers.get("range", "")
            others = (self.headers.get("if-range", ""), self.headers.get("if-none-match", ""))
            served.requests.append((self.path, asked, *others))
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                _answer(self, served, asked, *others, stop)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # clients that leave early are what is tested

    server = Server(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    served.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(
    handler: Any, served: FileServer, asked: str, if_range: str, if_none_match: str, stop: threading.Event
) -> None:
    handler.close_connection = True
    if served.redirect_to:
        return _headers(handler, 302, {"Location": served.redirect_to, "Content-Length": "0"})
    if served.status != 200:
        return _headers(handler, served.status, {"Content-Length": "0"})
    headers = {"ETag": served.tag()} if served.tag() else {}
    if served.modified_s is not None:
        headers["Last-Modified"] = formatdate(served.modified_s, usegmt=True)
    if if_none_match and if_none_match == served.tag():
        return _headers(handler, 304, headers)
    status, body, start = 200, served.content, 0
    is_current = not if_range or if_range in headers.values()
    if asked and served.has_ranges and is_current:
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first)
        if start >= len(body):
            return _headers(handler, 416, {"Content-Range": f"bytes */{len(body)}", "Content-Length": "0"})
        body = body[start : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{len(served.content)}"
        status = 206
    how = "" if asked == "bytes=0-0" else (served.misbehave.pop(0) if served.misbehave else served.always)
    _send(handler, served, how, status, headers, body, stop)


def _send(
    handler: Any, served: FileServer, how: str, status: int, headers: dict[str, str], body: bytes, stop: threading.Event
) -> None:
    if how == "html":
        status, body = 200, b"<!DOCTYPE html><html>log in first</html>"
        headers = {"Content-Type": "text/html", **{k: v for k, v in headers.items() if k == "ETag"}}
    if how == "wrong range":
        headers["Content-Range"] = f"bytes 7-{6 + len(body)}/{len(served.content)}"
    if how == "compressed":
        headers["Content-Encoding"] = "gzip"
    if how == "busy":
        return _headers(handler, 503, {"Content-Length": "0"})
    stated = {"states more": len(body) + 1000, "states less": len(body) - 1000}.get(how, len(body))
    if served.has_length and how != "endless":
        headers["Content-Length"] = str(stated)
    _headers(handler, status, headers)
    _write(handler, how, body, stop)


def _write(handler: Any, how: str, body: bytes, stop: threading.Event) -> None:
    if how == "endless":
        while not stop.is_set():
            handler.wfile.write(bytes(65536))
    elif how == "trickle":
        for byte in body:
            if stop.wait(0.02):
                return
            handler.wfile.write(bytes([byte]))
    elif how == "stall":
        handler.wfile.write(body[:1000])
        stop.wait(20)
    else:
        handler.wfile.write(body[: len(body) // 3] if how == "cut" else body)


def _headers(handler: Any, status: int, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Connection", "close")
    handler.end_headers()
