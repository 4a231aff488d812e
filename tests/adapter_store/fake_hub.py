"""A hub on loopback that speaks as much of the protocol as huggingface_hub needs to resolve and download."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OPEN, GATED, HIDDEN, BAD_TOKEN, FORBIDDEN, BROKEN = "open", "gated", "hidden", "bad token", "forbidden", "broken"

_REFUSALS = {
    GATED: (403, {"X-Error-Code": "GatedRepo"}),
    HIDDEN: (401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}),
    BAD_TOKEN: (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    FORBIDDEN: (403, {}),
    BROKEN: (500, {}),
}


@dataclass
class Repo:
    """A repository: commits of files, branches, and who may read it. `lfs` files tell their sha256.

    `stored_at` is another host that downloads are sent to, as a hub does with large files.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    access: str = OPEN
    lfs: bool = True
    corrupt_downloads: int = 0
    cut_downloads: int = 0
    trickles: bool = False
    stored_at: str = ""

    def commit(self, branch: str = "main", **files: bytes) -> str:
        """Add a commit; `__` in a name stands for a dot."""
        named = {name.replace("__", "."): content for name, content in files.items()}
        sha = hashlib.sha1(json.dumps([len(self.commits), sorted(named)]).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = named, sha
        return sha


@dataclass
class FakeHub:
    """The repositories, and the requests that were made: (method, path, token)."""

    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def paths(self, method: str, part: str) -> list[str]:
        """The paths of the requests so far that contain `part`."""
        return [path for made, path, _ in self.requests if made == method and part in path]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve until the block is left."""
    hub, stop = FakeHub(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._handle(send_body=True)

        def do_HEAD(self) -> None:
            self._handle(send_body=False)

        def _handle(self, send_body: bool) -> None:
            hub.requests.append((self.command, self.path, self.headers.get("authorization", "")))
            path = self.path.partition("?")[0]
            status, headers, body = _answer(hub, path)
            repo = _repo_of(hub, path) if "/resolve/" in path else None
            if status == 200 and repo is not None:
                status, body = _download(repo, self.path, self.headers.get("range", ""), headers, body)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if send_body:
                self.close_connection = repo is not None and repo.cut_downloads > 0
                _send(self.wfile, repo, body, stop)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _download(repo: Repo, path: str, asked: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """Status and body of a download; adds to the headers."""
    size_bytes = len(body)
    if repo.stored_at and "on-cdn" not in path:
        headers |= {"Location": f"{repo.stored_at}{path}?on-cdn", "X-Linked-Size": str(size_bytes)}
        return 302, b""
    if not asked:
        return 200, body
    first = int(asked.removeprefix("bytes=").removesuffix("-"))
    headers["Content-Range"] = f"bytes {first}-{size_bytes - 1}/{size_bytes}"
    return 206, body[first:]


def _send(to: Any, repo: Repo | None, body: bytes, stop: threading.Event) -> None:
    if repo is not None and repo.corrupt_downloads:
        repo.corrupt_downloads -= 1
        body = bytes(len(body))
    if repo is not None and repo.cut_downloads:
        repo.cut_downloads -= 1
        body = body[: len(body) // 2]
    if repo is None or not repo.trickles:
        to.write(body)
        return
    for byte in body:
        if stop.wait(0.02):
            return
        with contextlib.suppress(ConnectionError):
            to.write(bytes([byte]))


def _repo_of(hub: FakeHub, path: str) -> Repo | None:
    words = path.removeprefix("/api/models").strip("/").split("/")
    return hub.repos.get("/".join(words[:2]))


def _answer(hub: FakeHub, path: str) -> tuple[int, dict[str, str], bytes]:
    repo = _repo_of(hub, path)
    if repo is None:
        return 404, {"X-Error-Code": "RepoNotFound"}, b""
    if repo.access in _REFUSALS:
        status, headers = _REFUSALS[repo.access]
        return status, headers, b""
    words = path.removeprefix("/api/models").strip("/").split("/")
    revision = words[3].replace("%2F", "/") if len(words) > 3 else "main"
    sha = repo.branches.get(revision, revision)
    if sha not in repo.commits:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    if path.startswith("/api/models"):
        found = _tree(sha, repo) if words[2:3] == ["tree"] else _model_info(words, sha, repo)
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
    name = "/".join(words[4:])
    if name not in repo.commits[sha]:
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b""
    content = repo.commits[sha][name]
    return 200, {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, content


def _model_info(words: list[str], sha: str, repo: Repo) -> dict[str, Any]:
    siblings = []
    for name, content in repo.commits[sha].items():
        digest = hashlib.sha256(content).hexdigest()
        one: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": digest[:40]}
        if repo.lfs:
            one["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 100}
        siblings.append(one)
    return {"id": "/".join(words[:2]), "sha": sha, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


def _tree(sha: str, repo: Repo) -> list[dict[str, Any]]:
    """What `snapshot_download` asks for."""
    return [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in repo.commits[sha].items()
    ]
