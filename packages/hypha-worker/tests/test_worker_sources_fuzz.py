"""Fuzzed URIs, digests, records and answers of web servers: each is refused in words, and none reaches an address."""

from __future__ import annotations

import random
from pathlib import Path, PurePosixPath

import anyio
import pytest
import trio

from hypha_net import content_directory
from hypha_net.retries import ONCE
from hypha_net.testing import MemoryNetwork
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import download_from_uri
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import BridgeError
from hypha_worker.job_storage import JobStorage

CASES = pytest.mark.parametrize(
    "cases", [300, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])]
)
SEEDS = [
    "http://127.0.0.1/x", "https://user:pass@[::1]:8080/a?b=c#d", "file:///etc/passwd", "file://localhost/../x",
    "s3://bucket/key/%2e%2e", "s3://u@b:1/k?v#f", "sha256:" + "ab" * 32, "http://0x7f000001:1/", "HTTP://127.1/%00",
    "http://[::ffff:10.0.0.1%25eth0]/", "http://xn--a/", "http://ä.test:99999/", "//host/x", "http://localhost./",
]  # fmt: skip
BITS = ["%", "%00", "\0", "\n", "@", "[", "]", ":", "/", "//", "..", "#", "?", "\\", "\ud800", "é", "0x", "\u2028", " "]
RECORDS = [b'{"size": 1}', b'{"size": 18446744073709551616}', b'{"size": null}', b"[]", b"\xff", b'{"size": 1.5}']


def mutated(chance: random.Random, text: str) -> str:
    """Change a text in up to four places."""
    for _ in range(chance.randrange(5)):
        place = chance.randrange(len(text) + 1)
        kind = chance.randrange(3)
        if kind == 0:
            text = text[:place] + chance.choice(BITS) + text[place:]
        elif kind == 1:
            text = text[:place] + text[place + chance.randrange(4) :]
        else:
            text = text[:place] + chr(chance.choice([chance.randrange(128), chance.randrange(0x110000)])) + text[place:]
    return text


class NoResolver(trio.abc.HostnameResolver):
    """Resolves no name, so that no test asks a server."""

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # type: ignore[no-untyped-def]
        raise OSError(-2, "Name or service not known")

    async def getnameinfo(self, sockaddr, flags):  # type: ignore[no-untyped-def]
        raise NotImplementedError


@CASES
async def test_fuzzed_uris_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: int) -> None:
    """Hosts and buckets match any pattern, so that what is refused is refused for what it is."""
    monkeypatch.setattr("hypha_net.retries.NO_HOLDER", ONCE)
    connected: list[str] = []
    chance, access = random.Random(7), AccessPolicy(hosts=("*",), roots=(tmp_path / "root",))
    (work_dir := tmp_path / "job").mkdir()

    async def connect(remote_host: str, **_options: object) -> None:
        connected.append(remote_host)
        raise OSError("refused")

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    trio.socket.set_custom_hostname_resolver(NoResolver())
    async with MemoryNetwork().endpoint("worker") as worker:
        storage = JobStorage(work_dir, 1000)
        files = PeerFiles(worker, storage)
        for _ in range(cases):
            url = mutated(chance, chance.choice(SEEDS))
            with pytest.raises(BridgeError) as caught:
                await download_from_uri(url, PurePosixPath(), access, storage=storage, files=files)
            assert caught.value.status in (400, 403, 404, 502, 504), (url, caught.value)
            assert not ("//user:pass@[" in url and "pass" in caught.value.detail), (url, caught.value.detail)
    assert not list(work_dir.iterdir())
    assert not [host for host in connected if host.startswith(("127.", "10.", "::1"))]


@CASES
async def test_fuzzed_records_are_ignored_or_name_a_size(cases: int) -> None:
    chance = random.Random(8)
    network = MemoryNetwork()
    async with network.endpoint("worker") as worker, network.endpoint("peer") as peer:
        key = content_directory.content_key("ab" * 32)
        for _ in range(cases):
            text = mutated(chance, chance.choice(RECORDS).decode("latin-1"))
            await peer.put_record(key, text.encode("utf-8", "surrogatepass"))
            for holder in await content_directory.find_holders(worker, "ab" * 32):
                assert holder.peer == peer.peer_id
                assert 0 <= holder.size < 1 << 64
