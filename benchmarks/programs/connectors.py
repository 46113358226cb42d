"""A worker's connectors and, for comparison, the downloads of the libraries that they use, each to a file."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import anyio.to_thread

from benchmarks.children import options, serve_commands_async
from benchmarks.programs.node import open_node
from benchmarks.programs.sources import BUCKET
from hypha_net import content_directory, transfer
from hypha_net.connectors.s3_client import S3Client, S3Settings
from hypha_net.endpoint import Endpoint
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.connectors.local_files import copy_local_files
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.task_storage import TaskStorage

LIMIT = 1 << 40
REPOSITORY = "benchmark/model"
BLOCK = 1 << 20


class Connectors:
    """Commands of the parent. Each returns seconds, and the anonymous memory that it took at most."""

    def __init__(self, endpoint: Endpoint, folder: Path, web: str, s3: str, root: Path) -> None:
        self._endpoint = endpoint
        self._folder = folder
        self._web = web
        self._client = S3Client(S3Settings(s3, "us-east-1", "id", "secret"))
        self._access = AccessPolicy(hosts=("127.0.0.1",), buckets=(BUCKET,), roots=(root,), s3=self._client)

    async def fetch(self, uri: str) -> tuple[float, int]:
        """Fetch what a URI or a path names, or the file of the hub, as a job would."""
        storage = TaskStorage(self._folder, LIMIT)
        with _measured() as found:
            if uri.startswith("/"):
                await copy_local_files(uri, PurePosixPath("file"), self._access, storage)
            elif uri == "hub":
                wanted = HuggingFaceReference(repository=REPOSITORY, filenames=("file",))
                await Downloads(self._access, storage).from_hub(wanted, PurePosixPath())
            else:
                files = PeerFiles(self._endpoint, storage)
                await Downloads(self._access, storage, files).from_uri(uri, PurePosixPath(), "file")
        return found()

    async def fetch_plainly(self, kind: str, place: str, peer: str = "") -> tuple[float, int]:
        """Fetch the same by the library alone."""
        target = self._folder / "file"
        with _measured() as found:
            if kind == "dht":
                request = content_directory.content_request(place)
                await transfer.pull(self._endpoint, PeerId.parse(peer), request, target, digest=f"sha256:{place}")
            else:
                plain: dict[str, Callable[[str, Path], object]] = {
                    "uri": self._by_httpx,
                    "s3": self._by_obstore,
                    "hub": self._by_hub,
                    "file": shutil.copyfile,
                    "file URL": _copy_and_hash,
                }
                await anyio.to_thread.run_sync(plain[kind], place, target)
        return found()

    @staticmethod
    def _by_httpx(url: str, target: Path) -> None:
        import httpx

        with target.open("wb") as file, httpx.stream("GET", url, trust_env=False, timeout=60) as response:
            for block in response.iter_bytes(BLOCK):
                file.write(block)

    def _by_obstore(self, key: str, target: Path) -> None:
        import obstore

        with target.open("wb") as file:
            for block in obstore.get(self._client.open_bucket(BUCKET), key).stream(min_chunk_size=BLOCK):
                file.write(block)

    def _by_hub(self, name: str, target: Path) -> None:
        from huggingface_hub import hf_hub_download

        folder = self._folder / "hub"
        found = Path(hf_hub_download(REPOSITORY, name, local_dir=folder, endpoint=self._web, token=False))
        found.replace(target)
        shutil.rmtree(folder)


def _copy_and_hash(source: str, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        hashlib.file_digest(file, "sha256")


@contextmanager
def _measured() -> Iterator[Callable[[], tuple[float, int]]]:
    """Yield a function that returns the seconds and the largest anonymous memory, less that before, at the end."""
    before, most, done = _anonymous(), [0], threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], _anonymous())

    watcher = threading.Thread(target=look)
    watcher.start()
    began, seconds = time.perf_counter(), [0.0]
    try:
        yield lambda: (seconds[0], max(0, most[0] - before))
        seconds[0] = time.perf_counter() - began
    finally:
        done.set()
        watcher.join()


def _anonymous() -> int:
    """Return the anonymous resident memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


async def main() -> None:
    given: dict[str, Any] = options()
    folder, web, s3, root = Path(given.pop("folder")), given.pop("web"), given.pop("s3"), Path(given.pop("root"))
    os.environ["HF_ENDPOINT"] = web  # read when huggingface_hub is imported
    async with open_node(**given) as endpoint:
        connectors = Connectors(endpoint, folder, web, s3, root)
        commands: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "fetch": connectors.fetch,
            "fetch_plainly": connectors.fetch_plainly,
        }
        await serve_commands_async({"peer": str(endpoint.peer_id)}, commands)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    anyio.run(main, backend="trio")
