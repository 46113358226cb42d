"""Downloads by HTTP from a loopback server: ranges, lying answers, fuzzed sources, and non-public addresses."""

from __future__ import annotations

import hashlib
import ipaddress
import random
import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import anyio
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from hypha_net import content_directory, retries
from hypha_net.connectors.address_check import is_allowed_address
from hypha_net.retries import ONCE, RetryPolicy
from hypha_net.testing import MemoryNetwork
from hypha_proto.bridge_api import FetchedFile
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import BridgeError
from hypha_worker.task_storage import TaskStorage

CONTENT = bytes(range(256)) * 40
LOOPBACK = AccessPolicy(hosts=("127.0.0.1",))


@dataclass
class Server:
    """Answers the requests in their order: each answer is the bytes to send, and then the connection is closed."""

    answers: list[Callable[[str], bytes]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    port: int = 0
    stall: threading.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/file.bin"

    @property
    def ranges(self) -> list[str | None]:
        found = [re.search(r"(?mi)^range: *(\S+)", request) for request in self.requests]
        return [match and match[1] for match in found]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    running = Server()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                if not (line := self.rfile.readline()):
                    return
                request += line
            running.requests.append(request.decode())
            answer = running.answers[min(len(running.requests), len(running.answers)) - 1]
            self.wfile.write(answer(running.requests[-1]))
            if running.stall is not None:
                running.stall.wait(20)

    monkeypatch.setattr(retries, "TRANSFER", RetryPolicy("test", (0.0, 0.0)))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as tcp:
        tcp.daemon_threads = True
        running.port = tcp.server_address[1]
        thread = threading.Thread(target=tcp.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        if running.stall is not None:
            running.stall.set()
        tcp.shutdown()
        thread.join(5)


def answer(body: bytes, status: str = "200 OK", length: int | None = None, **headers: str) -> Callable[[str], bytes]:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([*lines, "connection: close", "", ""]).encode()
    return lambda _request: head + body


def part(first: int, total: int | str = len(CONTENT), etag: str = '"one"') -> Callable[[str], bytes]:
    body = CONTENT[first:]
    return answer(body, "206 Partial Content", content_range=f"bytes {first}-{len(CONTENT) - 1}/{total}", etag=etag)


def fetch(
    url: str, folder: Path, access: AccessPolicy = LOOPBACK, limit: int = 100_000, timeout: float = 20.0
) -> FetchedFile:
    async def main() -> FetchedFile:
        storage = TaskStorage(folder, limit)
        return await Downloads(access, storage, timeout=timeout).from_uri(url, PurePosixPath())

    return anyio.run(main, backend="trio")


def refused(url: str, folder: Path, access: AccessPolicy = LOOPBACK, **keys: float) -> tuple[int, str]:
    with pytest.raises(BridgeError) as caught:
        fetch(url, folder, access, **keys)  # type: ignore[arg-type]
    assert not list(folder.iterdir())
    return caught.value.status, caught.value.detail


CUT = answer(CONTENT[:5000], length=len(CONTENT), etag='"one"')


def test_a_download_that_breaks_off_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.answers = [CUT, part(5000)]
    found = fetch(server.url, tmp_path)
    assert (tmp_path / found.path).read_bytes() == CONTENT
    assert found.checksum == f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    assert server.ranges == [None, "bytes=5000-"]
    assert 'If-Range: "one"' in server.requests[1]


def test_a_download_that_breaks_off_before_its_first_byte_is_no_condition(server: Server, tmp_path: Path) -> None:
    server.answers = [answer(b"", length=len(CONTENT), etag='"one"'), answer(CONTENT, etag='"one"')]
    assert fetch(server.url, tmp_path).size == len(CONTENT)
    assert "If-None-Match" not in server.requests[1]


WHOLE = answer(CONTENT, etag='"two"')


@pytest.mark.parametrize(
    ("second", "third"),
    [
        pytest.param(WHOLE, WHOLE, id="whole"),
        pytest.param(part(5000, etag='"two"'), WHOLE, id="part of another version"),
        pytest.param(part(4000), WHOLE, id="another part"),
        pytest.param(answer(b"", "416 Range Not Satisfiable"), WHOLE, id="no such range"),
        pytest.param(answer(b"", "503 Busy"), part(5000), id="busy for a while"),
    ],
)
def test_a_download_that_breaks_off_is_complete_and_of_one_version(
    server: Server, tmp_path: Path, second: Callable[[str], bytes], third: Callable[[str], bytes]
) -> None:
    server.answers = [CUT, second, third]
    found = fetch(server.url, tmp_path)
    assert (tmp_path / found.path).read_bytes() == CONTENT


def test_a_server_without_validators_is_asked_for_the_whole_file_again(server: Server, tmp_path: Path) -> None:
    server.answers = [answer(CONTENT[:5000], length=len(CONTENT), etag='W/"weak"'), answer(CONTENT)]
    found = fetch(server.url, tmp_path)
    assert (tmp_path / found.path).read_bytes() == CONTENT
    assert server.ranges == [None, None]


@pytest.mark.parametrize(
    ("answers", "status", "told"),
    [
        ([CUT], 502, "RemoteProtocolError"),
        ([answer(b"", "503 Busy")], 502, "status 503"),
        ([answer(b"", "403 Forbidden")], 502, "status 403"),
        ([answer(b"", "404 Not Found")], 404, "status 404"),
        ([answer(b"x", content_encoding="gzip")], 502, "encoded (gzip)"),
        ([lambda _request: b"HTTP/1.1 200 OK\r\ncontent-length: 1e9\r\n\r\nx"], 502, "ProtocolError"),
        ([lambda _request: b"nonsense\r\n\r\n"], 502, "ProtocolError"),
        ([CUT, part(5000, total=5000)], 502, "more came than the 5000 bytes"),
        ([CUT, part(5000, total=len(CONTENT) + 1)], 502, "it changed while it was downloaded"),
        ([answer(CONTENT, "206 Partial Content")], 502, "status 206"),
        ([CUT, answer(CONTENT, "206 Partial Content")], 502, "Content-Range"),
        ([answer(b"x", length=10**17)], 507, "storage"),
    ],
)
def test_a_wrong_answer_is_reported_and_leaves_nothing(
    server: Server, tmp_path: Path, answers: list[Callable[[str], bytes]], status: int, told: str
) -> None:
    server.answers = answers
    found, detail = refused(server.url, tmp_path)
    assert (found, told in detail, f"127.0.0.1:{server.port}/file.bin" in detail or found == 507) == (
        status,
        True,
        True,
    ), detail


def test_an_endless_file_ends_with_the_storage_of_the_job(server: Server, tmp_path: Path) -> None:
    chunk = f"{len(CONTENT):x}\r\n".encode() + CONTENT + b"\r\n"
    server.answers = [lambda _request: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk * 400]
    assert refused(server.url, tmp_path, limit=50_000)[0] == 507


def test_a_server_that_stalls_is_given_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.stall = threading.Event()
    server.answers = [answer(CONTENT[:5000], length=len(CONTENT))]
    monkeypatch.setattr("hypha_net.connectors.http_source._TIMEOUTS", {"timeout": {"read": 0.1}})
    status, detail = refused(server.url, tmp_path)
    assert (status, "ReadTimeout" in detail) == (504, True), detail
    assert len(server.requests) == 3
    monkeypatch.undo()
    assert refused(server.url, tmp_path, timeout=0.2) == (504, f"{server.url} was not downloaded within 0.2 s")


def test_secrets_of_a_url_are_not_in_its_errors(server: Server, tmp_path: Path) -> None:
    server.answers = [answer(b"", "403 Forbidden")]
    url = server.url.replace("//", "//user:pass%40word@") + "?X-Amz-Signature=secret1"
    _, detail = refused(url, tmp_path)
    assert "secret1" not in detail
    assert "pass" not in detail
    assert "Authorization: Basic dXNlcjpwYXNzQHdvcmQ=" in server.requests[0]


def test_proxies_of_the_environment_are_not_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server.answers = [answer(CONTENT)]
    assert fetch(server.url, tmp_path).size == len(CONTENT)


# --------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "0x7f000001", "2130706433", "localhost", "0", "[::ffff:7f00:1]"]
)
def test_an_address_that_is_not_public_is_refused_however_it_is_written(
    server: Server, tmp_path: Path, host: str
) -> None:
    url = f"http://{host}:{server.port}/file.bin"
    status, detail = refused(url, tmp_path, AccessPolicy(hosts=("*",)))
    assert (status, "connectors.networks" in detail) == (403, True), detail
    assert not server.requests


def test_a_redirect_to_an_address_that_is_not_public_is_refused(server: Server, tmp_path: Path) -> None:
    server.answers = [answer(b"", "302 Found", location="http://169.254.169.254/latest/meta-data")]
    access = AccessPolicy(hosts=("*",), networks=(ipaddress.ip_network("127.0.0.0/8"),))
    status, detail = refused(server.url, tmp_path, access)
    assert (status, "169.254.169.254" in detail) == (403, True), detail


class Resolver(trio.abc.HostnameResolver):
    """Resolves names to these addresses in turn; without one left it resolves none, so that no test asks a server."""

    def __init__(self, *addresses: str) -> None:
        self.left, self.asked = list(addresses), list[str]()

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # type: ignore[no-untyped-def]
        self.asked.append(host.decode())
        if not self.left:
            raise OSError(-2, "Name or service not known")
        return [(2, 1, 6, "", (self.left.pop(0), port))]

    async def getnameinfo(self, sockaddr, flags):  # type: ignore[no-untyped-def]
        raise NotImplementedError


async def test_a_name_is_resolved_once_for_a_connection_and_checked_each_time(server: Server, tmp_path: Path) -> None:
    """A name that is public when it is checked and private when it is connected to (DNS rebinding)."""
    server.answers = [answer(CONTENT)]
    resolver = Resolver("127.0.0.1", "169.254.169.254")
    access = AccessPolicy(hosts=("rebind.test",), networks=(ipaddress.ip_network("127.0.0.0/8"),))
    url = f"http://rebind.test:{server.port}/file.bin"
    trio.socket.set_custom_hostname_resolver(resolver)
    storage = TaskStorage(tmp_path, 100_000)
    found = await Downloads(access, storage).from_uri(url, PurePosixPath())
    assert found.size == len(CONTENT)
    assert resolver.asked == ["rebind.test"]
    with pytest.raises(BridgeError, match=r"169\.254\.169\.254, which is not public"):
        await Downloads(access, storage).from_uri(url, PurePosixPath())
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1", "172.16.0.1", "192.168.1.1", "127.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "fec0::1", "2001:db8::1",
        "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:a00:1::", "2002:7f00:1::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_allowed_address(address, ())


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_allowed_address(address, ())


@given(st.ip_addresses(network="127.0.0.0/8") | st.ip_addresses(network="10.0.0.0/8"))
def test_an_address_is_judged_alike_in_all_its_forms(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for base in ("::ffff:0:0", "64:ff9b::"):
        form = str(ipaddress.IPv6Address(int(ipaddress.IPv6Address(base)) | number))
        assert not is_allowed_address(form, ())
        assert is_allowed_address(form, (ipaddress.ip_network(f"{address}/32"),))


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
    trio.socket.set_custom_hostname_resolver(Resolver())
    async with MemoryNetwork().endpoint("worker") as worker:
        storage = TaskStorage(work_dir, 1000)
        files = PeerFiles(worker, storage)
        for _ in range(cases):
            url = mutated(chance, chance.choice(SEEDS))
            with pytest.raises(BridgeError) as caught:
                await Downloads(access, storage, files).from_uri(url, PurePosixPath())
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
