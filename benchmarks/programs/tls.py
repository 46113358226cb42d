"""Reference for transfers: a file over a blocking `ssl` socket, in large blocks, its digest computed on arrival.

The TLS contexts are those of a Hypha node: TLS 1.3 with certificates on both sides.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks.children import options, serve_commands
from hypha_net.identity import load_identity

BLOCK = 1 << 20


class TransferPeer:
    """One end of a transfer."""

    def __init__(self, files: dict[str, str]) -> None:
        self._identity = load_identity(Path(files["cert"]), Path(files["key"]), Path(files["trust"]))
        self._socket: ssl.SSLSocket | None = None

    def listen(self, path: str) -> int:
        """Serve a file to every connection, as often as it is requested; return the port."""
        listener = socket.create_server(("127.0.0.1", 0))
        context = self._identity.server_context()

        def serve() -> None:
            while True:
                raw, _ = listener.accept()
                threading.Thread(target=self._give, args=(raw, context, path), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return int(listener.getsockname()[1])

    def _give(self, raw: socket.socket, context: ssl.SSLContext, path: str) -> None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(raw, server_side=True) as tls:
            while request := tls.recv(1):
                if request == b"p":
                    tls.sendall(request)
                    continue
                tls.sendall(os.stat(path).st_size.to_bytes(8, "little"))
                block = memoryview(bytearray(BLOCK))
                with open(path, "rb", buffering=0) as file:
                    while count := file.readinto(block):
                        tls.sendall(block[:count])

    def connect(self, port: int) -> float:
        """Connect; return the seconds until the other side has accepted the connection."""
        began = time.perf_counter()
        raw = socket.create_connection(("127.0.0.1", port))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = self._identity.client_context().wrap_socket(raw)
        return time.perf_counter() - began

    def take(self, target: str, digest: str) -> float:
        """Fetch the file once; return the seconds."""
        assert self._socket is not None
        began = time.perf_counter()
        self._socket.sendall(b"x")
        size = left = int.from_bytes(self._exactly(8), "little")
        hasher, block = blake3(), memoryview(bytearray(BLOCK))
        with open(target, "xb", buffering=0) as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            while left:
                filled = 0
                while filled < min(BLOCK, left):
                    filled += self._socket.recv_into(block[filled : min(BLOCK, left)])
                hasher.update(block[:filled])
                file.write(block[:filled])
                left -= filled
        assert f"blake3:{hasher.hexdigest()}" == digest
        return time.perf_counter() - began

    def ping(self, count: int) -> list[float]:
        """Send a byte and wait for its return, `count` times; return the seconds of each."""
        assert self._socket is not None
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self._socket.sendall(b"p")
            self._socket.recv(1)
            times.append(time.perf_counter() - began)
            time.sleep(0.002)
        return times

    def _exactly(self, count: int) -> bytes:
        assert self._socket is not None
        data = b""
        while len(data) < count:
            data += self._socket.recv(count - len(data))
        return data


def main() -> None:
    peer = TransferPeer(options()["files"])
    commands: dict[str, Any] = {"listen": peer.listen, "connect": peer.connect, "take": peer.take, "ping": peer.ping}
    serve_commands({}, commands)


main()
