"""A local Hugging Face hub for unmodified `huggingface_hub`: one repository with revisions, protected by a token.

As on the real hub, small files are served by the hub itself and weights through a redirect to another host (here
another port) with a signed URL, an ETag that is their SHA-256, and ranges; the first transfer of each file breaks
off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from support.fake_http_server import served

COMMIT = "c0ffee" * 6 + "c0ff"
SIGNATURE = "X-Amz-Signature=5ecret"
ENDLESS_BYTES = 256 << 20
"""Bytes of an endless file after which this hub gives up."""


@dataclass
class Hub:
    """Contents of the hub and the requests it received."""

    files: dict[str, bytes]
    token: str | None
    """Requests without it are answered with 401; None for a public repository."""
    repository: str = "org/model"
    kind: str = "models"
    """Or datasets."""
    revisions: tuple[str, ...] = ("main", "v2", COMMIT)
    large: str = ".safetensors"
    break_off: bool = True
    """Whether the first transfer of a large file breaks off half-way."""
    endless: tuple[str, ...] = ()
    """Files that are sent without a length and do not end before `ENDLESS_BYTES`."""
    stated: int | None = None
    """Length that a HEAD request of an endless file is answered with."""
    streamed: int = 0
    """Bytes of endless files that were sent."""
    url: str = ""
    elsewhere: str = ""
    seen: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    """Method, path, token and range of each request to the hub."""
    seen_elsewhere: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    """The same for the host of the large files."""
    broken: set[str] = field(default_factory=set)
    not_served: list[str] = field(default_factory=list)
    """Requests of routes that are not implemented here; they fail the test at its end."""

    @property
    def prefix(self) -> str:
        """Return what comes before the repository in the path of a file."""
        return "" if self.kind == "models" else f"/{self.kind}"

    @property
    def ranges(self) -> list[str]:
        """Return the requested ranges."""
        return [asked for _, _, _, asked in self.seen_elsewhere if asked]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        _Handler.answer(self, body=True)

    def answer(self, *, body: bool) -> None:
        """Record and reject a request that is not implemented here."""
        repository = self.hub.repository
        told = (
            f"the stand-in hub was asked {self.command} {self.path}; it serves GET and HEAD of "
            f"/api/{self.hub.kind}/{repository}[/tree]/REVISION and {self.hub.prefix}/{repository}/resolve/REVISION/"
            "FILE alone: "
            "teach tests/support/fake_hf_hub.py the route, or keep the program from asking"
        )
        self.hub.not_served.append(told)
        self.close_connection = True  # the request body is not read
        self.say(501, {"content-type": "text/plain"}, told.encode(), body=body)

    def asked(self) -> tuple[str, str, str | None, str | None]:
        return self.command, self.path, self.headers.get("authorization"), self.headers.get("range")

    def say(self, status: int, headers: dict[str, str], content: bytes, *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def say_json(self, value: object) -> None:
        self.say(200, {"content-type": "application/json"}, json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        return


class _Api(_Handler):
    def answer(self, *, body: bool) -> None:
        hub = self.hub
        hub.seen.append(self.asked())
        path = unquote(urlsplit(self.path).path)
        if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
            code = {"x-error-code": "GatedRepo", "x-error-message": f"Access to {hub.repository} is restricted."}
            self.say(401, code, b'{"error": "Invalid credentials in Authorization header"}', body=body)
        elif path.startswith(api := f"/api/{hub.kind}/{hub.repository}"):
            self.describe(path.removeprefix(api))
        elif path.startswith(files := f"{hub.prefix}/{hub.repository}/resolve/"):
            self.resolve(*path.removeprefix(files).split("/", 1), body=body)
        elif path.startswith(("/api/models/", "/api/datasets/")) or "/resolve/" in path:
            self.say(404, {"x-error-code": "RepoNotFound"}, b"", body=body)
        else:
            super().answer(body=body)

    def describe(self, rest: str) -> None:
        kind, _, revision = rest.strip("/").partition("/")
        if (revision or "main") not in self.hub.revisions:
            self.say(404, {"x-error-code": "RevisionNotFound"}, b"")
        elif kind == "tree":
            self.say_json([self.entry(name) for name in self.hub.files])
        else:
            names = [{"rfilename": name} for name in self.hub.files]
            self.say_json({"id": self.hub.repository, "modelId": self.hub.repository, "sha": COMMIT, "siblings": names})

    def entry(self, name: str) -> dict[str, object]:
        content = self.hub.files[name]
        made: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
        if name.endswith(self.hub.large):
            made["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 134}
        return made

    def resolve(self, revision: str, name: str, *, body: bool) -> None:
        content = self.hub.files.get(name)
        if revision not in self.hub.revisions:
            self.say(404, {"x-error-code": "RevisionNotFound"}, b"", body=body)
        elif name in self.hub.endless:
            self.stream(body=body)
        elif content is None:
            self.say(404, {"x-error-code": "EntryNotFound", "x-repo-commit": COMMIT}, b"", body=body)
        elif name.endswith(self.hub.large):
            headers = {"x-repo-commit": COMMIT, "x-linked-etag": f'"{_sha256(content)}"'}
            headers |= {"x-linked-size": str(len(content)), "accept-ranges": "bytes"}
            self.say(302, {**headers, "location": f"{self.hub.elsewhere}/{name}?{SIGNATURE}"}, b"", body=body)
        else:
            self.say(200, {"x-repo-commit": COMMIT, "etag": f'"{_oid(content)}"'}, content, body=body)

    def stream(self, *, body: bool) -> None:
        """Send a file without a length until the client closes the connection."""
        hub, block = self.hub, bytes(1 << 20)
        self.send_response(200)
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", '"endless"')
        self.send_header("connection", "close")
        if not body and hub.stated is not None:
            self.send_header("x-linked-size", str(hub.stated))
        self.end_headers()
        self.close_connection = True
        with suppress(ConnectionError):
            while body and hub.streamed < ENDLESS_BYTES:
                self.wfile.write(block)
                hub.streamed += len(block)


class _Elsewhere(_Handler):
    def answer(self, *, body: bool) -> None:
        hub = self.hub
        hub.seen_elsewhere.append(self.asked())
        name = unquote(urlsplit(self.path).path).lstrip("/")
        if urlsplit(self.path).query != SIGNATURE or name not in hub.files:
            self.say(403, {}, b"", body=body)
            return
        content, asked = hub.files[name], self.headers.get("range")
        headers = {"etag": f'"{_sha256(content)}"', "accept-ranges": "bytes"}
        if asked and body:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), int(last or len(content) - 1)
            headers["content-range"] = f"bytes {begin}-{end}/{len(content)}"
            self.say(206, headers, content[begin : end + 1])
        elif body and hub.break_off and name not in hub.broken:
            hub.broken.add(name)
            self.say(200, headers, content, body=False)
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
        else:
            self.say(200, headers, content, body=body)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _oid(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


@contextmanager
def hub_server(files: dict[str, bytes], token: str | None = None) -> Iterator[Hub]:
    """Serve one repository; programs find the hub by ``HF_ENDPOINT``."""
    hub = Hub(files, token)
    api, elsewhere = (type("Handler", (kind,), {"hub": hub}) for kind in (_Api, _Elsewhere))
    with served(api) as hub.url, served(elsewhere) as url:
        hub.elsewhere = url.replace("127.0.0.1", "localhost")  # another host, which must not receive the token
        yield hub
    assert not hub.not_served, "\n".join(hub.not_served)
