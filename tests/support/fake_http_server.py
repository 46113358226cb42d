"""HTTP servers on the loopback interface in place of external services."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def answers(
    answer: Callable[[BaseHTTPRequestHandler], tuple[int, Mapping[str, str], bytes]],
) -> type[BaseHTTPRequestHandler]:
    """Return a handler of GET, HEAD and POST; `answer` returns the status, further headers and the content."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, content = answer(self)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            return

    return Handler


def files(find: Callable[[str], tuple[bytes | None, Mapping[str, str]]]) -> type[BaseHTTPRequestHandler]:
    """Return a GET and HEAD handler that serves what `find` returns for a path, and 404 where that is None.

    Args:
        find: content and further headers by path, the query included.
    """

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, Mapping[str, str], bytes]:
        content, headers = find(request.path)
        return 404 if content is None else 200, headers, content or b""

    return answers(answer)


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve while the context is open; yields the URL without a trailing slash."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
