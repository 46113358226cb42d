"""Services that connectors read from, on the loopback interface: a web server, a hub and moto's S3 server."""

from __future__ import annotations

import logging
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from moto.server import ThreadedMotoServer

from benchmarks.children import options, serve_commands

COMMIT = "0" * 40
"""Commit of every revision."""
BUCKET = "benchmark"


def handler(path: Path) -> type[BaseHTTPRequestHandler]:
    """Return a handler that answers every GET and HEAD with one file, as a web server and as a hub."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(path.stat().st_size))
            self.send_header("etag", '"benchmark"')
            self.send_header("x-repo-commit", COMMIT)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            with path.open("rb") as file:
                shutil.copyfileobj(file, self.wfile, 1 << 20)

        def log_message(self, *_: object) -> None:
            return

    return Handler


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler(Path(options()["path"])))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    storage = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    storage.start()
    host, port = storage.get_host_and_port()
    about = {"web": f"http://127.0.0.1:{web.server_port}", "s3": f"http://{host}:{port}"}
    serve_commands(about, {})
    storage.stop()
    web.shutdown()


if __name__ == "__main__":
    main()
