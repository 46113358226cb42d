"""Fuzzing of every parser of network input: malformed bytes close a stream or connection and never stop the node.

The target is a node in its own process that serves every protocol (tests/support/fuzz_target.py). Each case is a valid
message mutated by a seeded generator, so a failure can be reproduced from its seed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.kad_dht.pb.kademlia_pb2 import Message as KadMessage
from libp2p.pubsub.pb.rpc_pb2 import RPC
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from support import fuzz_target
from support.endpoint_helpers import push_header
from support.mutation import mutated
from support.process_ready import first_line
from support.waiting import run

from hypha_net import EndpointSettings, open_endpoint, rpc
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.errors import NetError
from hypha_proto.codec import to_cbor
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL, PUSH, TASKS
from hypha_proto.transfer import PullRequest, PushHeader

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


# ------------------------------------------------------------------------------------------------------ valid messages


def framed(message: Any) -> bytes:
    """Serialize a protobuf message after its length as a varint."""
    data = message.SerializeToString()
    length, prefix = len(data), bytearray()
    while length > 127:
        prefix.append(length & 127 | 128)
        length >>= 7
    return bytes([*prefix, length]) + data


def with_length(data: bytes) -> bytes:
    """Return a transfer header: its length in eight bytes, then the data."""
    return len(data).to_bytes(8, "little") + data


def valid_messages(peer: PeerId) -> Iterator[tuple[str, bytes]]:
    """Yield protocols and valid messages on them."""
    for entry in _wire():
        data = bytes.fromhex(entry["hex"])
        if entry["kind"] in ("request", "header") and entry["protocol"].startswith("/"):
            yield entry["protocol"], data
        if entry["name"].startswith("WorkerFrame"):
            yield TASKS, fuzz_target.SUBSCRIBE + len(data).to_bytes(4, "little") + data
    yield PUSH, with_length(to_cbor(PushHeader, push_header(100, "blake3:" + "00" * 32))) + bytes(100)
    yield PULL, with_length(to_cbor(PullRequest, PullRequest(dataset="d", index=1)))
    yield "/ipfs/ping/1.0.0", bytes(range(32))
    identify = Identify(
        protocol_version="x", agent_version="y", listen_addrs=[b"\x04\x7f\0\0\1\x06\0\1"], public_key=b"k"
    )
    yield "/ipfs/id/push/1.0.0", framed(identify)
    rpc_message = RPC()
    rpc_message.subscriptions.add(subscribe=True, topicid="hypha/worker")
    rpc_message.publish.add(
        from_id=peer.raw, seqno=b"12345678", data=b"x", topicIDs=["hypha/worker"], signature=b"s", key=b"k"
    )
    rpc_message.control.graft.add(topicID="hypha/worker")
    rpc_message.control.ihave.add(topicID="hypha/worker", messageIDs=[b"1"])
    yield "/meshsub/1.1.0", framed(rpc_message)
    for kind in range(6):
        message = KadMessage(type=kind, key=b"set")
        message.record.key, message.record.value = b"set", b'{"num_slices": 1}'
        message.closerPeers.add(id=peer.raw, addrs=[b"\x04\x7f\0\0\1\x06\0\1"])
        yield "/ipfs/kad/1.0.0", framed(message)
    for hop in range(3):
        request = HopMessage(type=hop)
        request.peer.id = peer.raw
        yield "/libp2p/circuit/relay/0.2.0/hop", framed(request)
    stop = StopMessage(type=0)
    stop.peer.id = peer.raw
    yield "/libp2p/circuit/relay/0.2.0/stop", framed(stop)
    yield "/libp2p/dcutr", framed(stop)


def _wire() -> Iterator[dict[str, Any]]:
    golden = Path(__file__).parents[2] / "hypha-proto" / "tests" / "own_wire.jsonl"
    for text in golden.read_text().splitlines():
        yield json.loads(text)


# -------------------------------------------------------------------------------------------------------------- target


@dataclass
class Target:
    """The node under attack."""

    address: str
    peer: PeerId
    process: psutil.Process
    errors: Path

    @property
    def port(self) -> int:
        return int(self.address.split("/")[4])

    def usage(self) -> tuple[int, int]:
        """Return the number of open descriptors, and the resident memory in MiB."""
        return self.process.num_fds(), self.process.memory_info().rss >> 20


@asynccontextmanager
async def opened(authority: Any, folder: Path) -> AsyncIterator[Target]:
    files = [str(path) for path in authority.files("target", "gateway")]
    command = [sys.executable, fuzz_target.__file__, *files, str(folder)]
    errors = folder / "errors"
    with errors.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        address = await anyio.to_thread.run_sync(first_line, process, 20, errors)
        peer = PeerId.parse(address.rsplit("/", 1)[1])
        yield Target(address, peer, psutil.Process(process.pid), errors)
        assert process.poll() is None, errors.read_text()[-4000:]
    finally:
        process.kill()
        process.communicate()


async def check_serves(target: Target, authority: Any) -> None:
    """Check that a well-behaved node is still served quickly."""
    with anyio.fail_after(10):
        async with open_endpoint(authority.identity("good"), EndpointSettings()) as good:
            assert await good.connect(target.address) == target.peer
            assert await rpc.call(good, target.peer, HEALTH_CHECK, HealthRequest()) == Health(healthy=True)


def run_attack(authority: Any, folder: Path, attack: Callable[[Target], Any]) -> None:
    """Attack; check that the target serves on, logs no traceback, and leaks neither descriptors nor memory."""

    async def main() -> None:
        async with opened(authority, folder) as target:
            await check_serves(target, authority)
            before = target.usage()
            await attack(target)
            await check_serves(target, authority)
            with anyio.move_on_after(20):  # half-open connections end by timeout
                while target.usage()[0] > before[0] + 8:
                    await anyio.sleep(0.2)
            after = target.usage()
            assert after[0] <= before[0] + 8, (before, after)
            assert after[1] <= before[1] + 100, (before, after)
            log = target.errors.read_text()
            assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]

    run(main, 280)


# ------------------------------------------------------------------------------------------------------------- attacks


def test_all_protocols(authority: Any, tmp_path: Path) -> None:
    async def attack(target: Target) -> None:
        async with open_endpoint(authority.identity("attacker"), EndpointSettings()) as attacker:
            tried = 0
            for number, (protocol, valid) in enumerate(valid_messages(attacker.peer_id)):
                for seed in range(40):
                    tried += await send_request(
                        attacker, target, protocol, mutated(valid, random.Random(f"{number}/{seed}"))
                    )
            assert tried > 1500, tried

    run_attack(authority, tmp_path, attack)


async def send_request(attacker: Libp2pEndpoint, target: Target, protocol: str, data: bytes) -> bool:
    """Send data on a protocol, reconnecting if necessary; return whether a stream could be opened."""
    with anyio.fail_after(10):
        await attacker.connect(target.address)
        try:
            stream = await attacker.open_stream(target.peer, [protocol])
        except NetError:
            return False
        with suppress(NetError):
            await stream.send_all(data)
            await stream.send_eof()
            with anyio.move_on_after(0.05):
                while await stream.receive_some():
                    pass
        await stream.reset()
        return True
