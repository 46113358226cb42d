"""Peers that lie about what they send or request: each causes a specific error, and leaves nothing behind."""

from __future__ import annotations

import logging
import random
import tracemalloc
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import anyio
import cbor2
import pytest
from blake3 import blake3
from support.endpoint_helpers import next_event, push_header
from support.gateways import Opener

from hypha_net import retries, transfer
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import NetError, StreamResetError
from hypha_net.events import Transferred
from hypha_net.retries import RetryPolicy
from hypha_net.transfer.framing import MAX_CONCURRENT, MAX_REASON_LENGTH, receive_message, send_message
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL, PUSH
from hypha_proto.transfer import MAX_HEADER, PSEUDO_GRADIENT, PullRequest, PushHeader

Kind = Literal["file", "memory"]

LIMIT = 1 << 30
REQUEST = PullRequest(dataset="d", index=2)
DATA = random.Random(0).randbytes(3 << 20)
DIGEST = f"blake3:{blake3(DATA).hexdigest()}"

each_kind = pytest.mark.parametrize("kind", ["file", "memory"])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "TRANSFER", RetryPolicy("test", (0.02, 0.02)))


@pytest.fixture(autouse=True)
def _nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that the log has no errors: misbehaviour of a peer is logged as a warning."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def header(**changed: object) -> bytes:
    """Return the header of a push as bytes; `changed` need not be valid."""
    fields: dict[str, object] = {
        "attempt": {"job_id": bytes(16), "task": "train", "number": 0},
        "round": 1,
        "kind": PSEUDO_GRADIENT,
        "name": "update",
        "size": len(DATA),
        "digest": DIGEST,
        "codec": "fp32",
        "samples": 0,
        "scheduler": PeerId.from_public_key(bytes(32)).raw,
    }
    return cbor2.dumps(fields | changed)


class Receiver:
    """Accepts pushes into a folder."""

    def __init__(self, node: Endpoint, folder: Path, max_bytes: int = LIMIT) -> None:
        folder.mkdir(exist_ok=True)
        self.node, self.folder = node, folder
        self.landed: list[bytes] = []
        self.names: list[str] = []

        async def accept(_peer: PeerId, header: PushHeader) -> transfer.FilePushTarget:
            self.names.append(header.name)
            path = anyio.Path(folder / str(len(self.names)))

            async def arrived(_size: int, _digest: str) -> None:
                self.landed.append(await path.read_bytes())
                await path.unlink()

            return transfer.FilePushTarget(Path(path), max_bytes, arrived)

        transfer.serve_pushes(node, accept)

    async def check_unharmed(self, peer: Endpoint) -> None:
        """Check that it has accepted and kept nothing, and accepts many valid pushes of the same peer."""
        assert self.landed == []
        async with anyio.create_task_group() as tasks:
            for _ in range(MAX_CONCURRENT + 1):
                tasks.start_soon(_push_one, peer, self.node)
        assert self.landed == [b"well"] * (MAX_CONCURRENT + 1)
        assert list(self.folder.iterdir()) == []


async def _push_one(peer: Endpoint, node: Endpoint) -> None:
    header = push_header(*await transfer.describe(b"well"), task=str(uuid.uuid4()))
    await transfer.push(peer, node.peer_id, b"well", header)


async def pushed(attacker: Endpoint, victim: Endpoint, sent: bytes, content: bytes = b"") -> list[Any]:
    """Return what a receiver answers to a push until the stream ends; the last item is `reset` if it is reset."""
    answers: list[Any] = []
    stream = await attacker.open_stream(victim.peer_id, [PUSH])
    try:
        await send_message(stream, sent)
        answers.append(cbor2.loads(await receive_message(stream)))
        with suppress(StreamResetError):  # it reads no more, and has sent the reason
            await stream.send_all(content)
            await stream.send_eof()
        while last := await stream.receive_some():
            answers.append(cbor2.loads(last[8:]))
    except StreamResetError:
        answers.append("reset")
    await stream.aclose()
    return answers


# ------------------------------------------------------------------------------------------------- receivers of pushes


async def test_oversized_push_is_refused_before_any_content(opener: Opener, tmp_path: Path) -> None:
    async with opener(3) as (_, attacker, victim):
        receiver = Receiver(victim, tmp_path / "landing")
        for size in (LIMIT + 1, 1 << 40, (1 << 64) - 1):
            [answer] = await pushed(attacker, victim, header(size=size), DATA)
            assert answer == {"Refused": f"{size} bytes are over the limit of {LIMIT}"}
        await receiver.check_unharmed(attacker)


async def test_impossible_file_size_is_refused_without_a_limit(opener: Opener, tmp_path: Path) -> None:
    async with opener(3) as (_, attacker, victim):
        receiver = Receiver(victim, tmp_path / "landing", max_bytes=1 << 64)
        for size in (1 << 62, (1 << 63) - 1, (1 << 64) - 1):
            [answer] = await pushed(attacker, victim, header(size=size))
            assert "no file system holds" in answer["Refused"] or "no room" in answer["Refused"]
        await receiver.check_unharmed(attacker)


async def test_memory_is_used_for_received_not_announced_bytes(opener: Opener, tmp_path: Path) -> None:
    async with opener(3) as (_, attacker, victim):
        receiver = Receiver(victim, tmp_path / "landing")
        streams = []
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(8):
                stream = await attacker.open_stream(victim.peer_id, [PUSH])
                await send_message(stream, header(size=LIMIT, digest=f"blake3:{number:064x}"))
                assert cbor2.loads(await receive_message(stream)) == {"GoOn": {"offset": 0}}
                streams.append(stream)
            assert tracemalloc.get_traced_memory()[1] - before < 8 * (5 << 20)  # two blocks each
        finally:
            tracemalloc.stop()
        for stream in streams:
            await stream.reset()
        await receiver.check_unharmed(attacker)


async def test_wrong_length_or_content_is_refused(opener: Opener, tmp_path: Path) -> None:
    cases = [
        (header(size=len(DATA) + 1), f"{len(DATA)} bytes came of {len(DATA) + 1}"),
        (header(size=len(DATA) - 1), "the digest is"),
        (header(size=0), "the digest is"),
        (header(digest="sha256:" + "0" * 64), "the digest is sha256:"),
    ]
    async with opener(3) as (_, attacker, victim):
        receiver = Receiver(victim, tmp_path / "landing")
        for sent, reason in cases:
            go_on, refusal = await pushed(attacker, victim, sent, DATA)
            assert go_on == {"GoOn": {"offset": 0}}
            assert reason in refusal["Refused"]
        await receiver.check_unharmed(attacker)


NONSENSE = [
    header(digest="md5:" + "0" * 32),
    header(digest="blake3:" + "0" * 63),
    header(digest="blake3:../../../../../../tmp/x" + "0" * 38),
    header(digest=3),
    header(size=-1),
    header(size=1 << 64),
    header(name=3),
    header() + b"\x00",
    b"\xff" * 60_000,
    b"\x81" * 60_000,
    b"\x9b" + b"\xff" * 8 + bytes(60_000),
    b"",
]


async def test_malformed_header_resets_its_stream(opener: Opener, tmp_path: Path) -> None:
    async with opener(3) as (_, attacker, victim):
        receiver = Receiver(victim, tmp_path / "landing")
        for sent in NONSENSE:
            assert await pushed(attacker, victim, sent, DATA) == ["reset"], sent[:100]
        assert receiver.names == []
        await receiver.check_unharmed(attacker)


async def test_header_length_is_limited(opener: Opener, tmp_path: Path) -> None:
    async with opener(3) as (_, attacker, victim):
        receiver = Receiver(victim, tmp_path / "landing")
        with victim.events.follow(Transferred) as events:
            _, refusal = await pushed(attacker, victim, header(name="n" * 60_000, kind="k" * 60_000, size=7), DATA)
            event = await next_event(events, Transferred)
        assert "digest" in refusal["Refused"]
        assert len(event.name) <= 200
        for length in (MAX_HEADER + 1, (1 << 64) - 1):
            stream = await attacker.open_stream(victim.peer_id, [PUSH])
            await stream.send_all(length.to_bytes(8, "little"))
            with pytest.raises(StreamResetError):
                await stream.receive_some()
        await receiver.check_unharmed(attacker)


async def test_push_that_trickles_is_aborted(opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypha_net.transfer.progress.IDLE_TIMEOUT", 0.2)
    async with opener(3) as (_, attacker, victim):
        receiver = Receiver(victim, tmp_path / "landing")
        stream = await attacker.open_stream(victim.peer_id, [PUSH])
        await send_message(stream, header())
        await receive_message(stream)
        with victim.events.follow(Transferred) as events:
            with pytest.raises(StreamResetError):
                while True:
                    await stream.send_all(b"x")
                    await anyio.sleep(0.01)
            while (event := await anext(events)).state != "failed":  # type: ignore[union-attr]
                pass
        assert isinstance(event, Transferred)
        assert "bytes moved in" in event.reason
        await receiver.check_unharmed(attacker)


@pytest.mark.parametrize("protocol", [PUSH, PULL])
async def test_header_that_trickles_is_aborted(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    async with opener(3) as (_, attacker, victim):
        receiver = Receiver(victim, tmp_path / "landing")
        transfer.serve_pulls(victim, _never)
        with monkeypatch.context() as patch, pytest.raises(StreamResetError):
            patch.setattr("hypha_net.transfer.framing.IDLE_TIMEOUT", 0.2)
            stream = await attacker.open_stream(victim.peer_id, [protocol])
            await stream.send_all((60_000).to_bytes(8, "little"))
            while True:
                await stream.send_all(b"x")
                await anyio.sleep(0.01)
        await receiver.check_unharmed(attacker)


async def _never(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
    raise AssertionError("half a request must not be asked about")


# --------------------------------------------------------------------------------------------------- receivers of pulls


Giver = Callable[[Stream, int], Awaitable[None]]


async def pulled_from(giver: Giver, attacker: Endpoint, victim: Endpoint, folder: Path) -> NetError:
    """Return the error of a pull from a peer that answers request `number`, from 0, with `giver(stream, number)`."""
    asked = 0

    async def give(stream: Stream) -> None:
        nonlocal asked
        await receive_message(stream)
        asked += 1
        await giver(stream, asked - 1)

    attacker.handle(PULL, give)
    await anyio.Path(folder).mkdir(exist_ok=True)
    with pytest.raises(transfer.TransferError) as caught:
        await transfer.pull(victim, attacker.peer_id, REQUEST, folder / "target", max_bytes=LIMIT, timeout=20)
    assert len(str(caught.value)) < 2 * MAX_REASON_LENGTH
    return caught.value


def start(size: int = len(DATA), digest: object = DIGEST) -> bytes:
    return cbor2.dumps({"Start": {"size": size, "digest": digest}})


LIES = {
    "1 TiB": (start(1 << 40), b"", f"{1 << 40} bytes are over the limit of {LIMIT}"),
    "too short": (start(len(DATA) + 5), DATA, f"{len(DATA)} bytes came of {len(DATA) + 5}"),
    "nothing": (start(LIMIT), b"", f"0 bytes came of {LIMIT}"),
    "too long": (start(len(DATA) - 5), DATA, "the digest is"),
    "other content": (start(), DATA[:-1] + b"?", "the digest is"),
    "digest by sha256": (start(digest="sha256:" + "0" * 64), DATA, "the digest is sha256:"),
    "empty": (start(0), b"", "the digest is"),
    "digest of another kind": (start(digest="md5:" + "0" * 32), DATA, "malformed header"),
    "no digest": (start(digest=None), DATA, "malformed header"),
    "a path as digest": (start(digest="blake3:../../etc/passwd"), DATA, "malformed header"),
    "size below 0": (start(-1), DATA, "malformed header"),
    "60 KiB of nonsense": (b"\xff" * 60_000, b"", "malformed header"),
    "60 KiB of reason": (cbor2.dumps({"Refused": "no" * 30_000}), b"", "refused by the peer: nono"),
    "an answer to a push": (cbor2.dumps({"GoOn": {"offset": 1 << 63}}), DATA, "malformed header"),
}


async def test_pull_of_wrong_content_fails_with_a_reason(opener: Opener, tmp_path: Path) -> None:
    async with opener(3) as (_, attacker, victim):
        for sent, content, reason in LIES.values():

            async def giver(stream: Stream, _number: int, sent: bytes = sent, content: bytes = content) -> None:
                with suppress(StreamResetError):  # it has already reset the stream
                    await send_message(stream, sent)
                    await stream.send_all(content)
                    await stream.send_eof()

            error = await pulled_from(giver, attacker, victim, tmp_path / "landing")
            assert reason in str(error)
            assert list((tmp_path / "landing").iterdir()) == []


async def test_peer_that_changes_its_answer_is_retried_a_few_times(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt gets another size for the same digest, or another digest, and is interrupted half way."""
    monkeypatch.setattr("hypha_net.transfer.progress.EVENT_INTERVAL", 0.0)
    asked: list[int] = []
    victims: list[Endpoint] = []

    async def giver(stream: Stream, number: int) -> None:
        asked.append(number)
        await send_message(stream, start(len(DATA) + number // 2, DIGEST if number % 2 else "blake3:" + "0" * 64))
        with victims[0].events.follow(Transferred) as events:
            await stream.send_all(DATA[: 2 << 20])
            while (await anext(events)).done < 1 << 20:  # type: ignore[union-attr]
                pass
        await stream.reset()

    async with opener(3) as (_, attacker, victim):
        victims.append(victim)
        await pulled_from(giver, attacker, victim, tmp_path / "landing")
        assert asked == [0, 1, 2]
        waiting = list((tmp_path / "landing").iterdir())
        assert all(path.name.startswith(".hypha-blake3-") for path in waiting)
        assert len(waiting) <= 3


async def test_pull_that_trickles_is_aborted(opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypha_net.transfer.progress.IDLE_TIMEOUT", 0.2)

    async def giver(stream: Stream, _number: int) -> None:
        await send_message(stream, start())
        while True:
            await stream.send_all(b"x")
            await anyio.sleep(0.01)

    async with opener(3) as (_, attacker, victim):
        error = await pulled_from(giver, attacker, victim, tmp_path / "landing")
        assert "bytes moved in" in str(error)
        assert list((tmp_path / "landing").iterdir()) == []


# -------------------------------------------------------------------------------------------------------------- senders


ANSWERS: list[tuple[list[object], str]] = [
    ([{"GoOn": {"offset": len(DATA) + 1}}], f"asked to go on from byte {len(DATA) + 1} of {len(DATA)}"),
    ([{"GoOn": {"offset": (1 << 64) - 1}}], f"asked to go on from byte {(1 << 64) - 1} of"),
    ([{"GoOn": {"offset": -1}}], "malformed header"),
    ([{"Receipt": {"size": 3}}], "malformed header"),
    ([{"Refused": "no" * 30_000}], "refused by the peer: nono"),
    ([{"GoOn": {"offset": 0}}, {"Refused": "no" * 30_000}], "refused by the peer: nono"),
    ([{"GoOn": {"offset": 0}}, {"GoOn": {"offset": 0}}], "malformed header"),
    ([{"GoOn": {"offset": 0}}, "Receipt" * 9_000], "malformed header"),
]


@each_kind
async def test_pusher_rejects_malformed_answers(opener: Opener, tmp_path: Path, kind: Kind) -> None:
    (tmp_path / "file").write_bytes(DATA)
    async with opener(3) as (_, attacker, victim):
        for answers, reason in ANSWERS:

            async def take(stream: Stream, answers: list[object] = answers) -> None:
                await receive_message(stream)
                for answer in answers:
                    await send_message(stream, cbor2.dumps(answer))
                    if answer is not answers[-1]:
                        while await stream.receive_some():
                            pass
                with anyio.move_on_after(5):
                    await stream.receive_some()

            attacker.handle(PUSH, take)
            with pytest.raises(transfer.TransferError) as caught:
                content = DATA if kind == "memory" else tmp_path / "file"
                await transfer.push(victim, attacker.peer_id, content, push_header(len(DATA), DIGEST), timeout=20)
            assert reason in str(caught.value)
            assert len(str(caught.value)) < 2 * MAX_REASON_LENGTH


@each_kind
async def test_pull_server_refuses_an_offset_past_the_end(opener: Opener, tmp_path: Path, kind: Kind) -> None:
    (tmp_path / "file").write_bytes(DATA)

    async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
        return transfer.PullSource(DATA if kind == "memory" else tmp_path / "file")

    async with opener(3) as (_, attacker, victim):
        transfer.serve_pulls(victim, resolve)
        answers = {}
        for offset in (len(DATA), len(DATA) + 1, (1 << 64) - 1):
            stream = await attacker.open_stream(victim.peer_id, [PULL])
            await send_message(stream, cbor2.dumps({"dataset": "d" * 60_000, "index": 0, "offset": offset}))
            answers[offset] = cbor2.loads(await receive_message(stream))
            assert await stream.receive_some() == b""
            await stream.aclose()
        assert answers.pop(len(DATA)) == {"Start": {"size": len(DATA), "digest": DIGEST}}
        for offset, answer in answers.items():
            assert answer == {"Refused": f"offset {offset} is past the end ({len(DATA)})"}
        for wrong in (-1, 1 << 64, "0"):
            stream = await attacker.open_stream(victim.peer_id, [PULL])
            await send_message(stream, cbor2.dumps({"dataset": "d", "index": 0, "offset": wrong}))
            with pytest.raises(StreamResetError):
                await stream.receive_some()


@each_kind
async def test_pull_server_aborts_when_the_peer_reads_nothing(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setattr("hypha_net.transfer.io.stream_copy.IDLE_TIMEOUT", 0.3)
    (tmp_path / "file").write_bytes(DATA * 4)

    async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
        return transfer.PullSource(DATA * 4 if kind == "memory" else tmp_path / "file")

    async with opener(3) as (_, attacker, victim):
        transfer.serve_pulls(victim, resolve)
        with victim.events.follow(Transferred) as events:
            stream = await attacker.open_stream(victim.peer_id, [PULL])
            await send_message(stream, cbor2.dumps({"dataset": "d", "index": 0}))
            while (event := await anext(events)).state != "failed":  # type: ignore[union-attr]
                pass
        assert isinstance(event, Transferred)
        assert "accepted no bytes" in event.reason
        await stream.reset()
