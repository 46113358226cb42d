"""Any bytes from a peer or a file are read, or refused with the error that the caller handles."""

from __future__ import annotations

import contextlib
import json
import random
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libp2p.pubsub.pb import rpc_pb2
from support.fuzz_target import SchedulerCodec
from support.mutation import mutated

from hypha_net import dataset_directory
from hypha_net._libp2p.kad.messages import Message
from hypha_net._libp2p.relay.dcutr import HolePunch
from hypha_net._libp2p.relay.messages import HopMessage, StopMessage
from hypha_net._libp2p.wire.delimited import MessageReader, read_message
from hypha_net.errors import TransferError
from hypha_net.identity import IdentityError, load_identity
from hypha_net.message_channel import ChannelError, MessageChannel
from hypha_net.testing import MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.codec import from_cbor
from hypha_proto.errors import DecodeError
from hypha_proto.tasks import MAX_FRAME, SchedulerFrame, StatusUpdate, TaskDefinition, WorkerFrame

MUTATIONS = st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=3)), min_size=1, max_size=4)


class Received:
    """A stream that delivers some bytes and ends."""

    protocol = "/test"
    peer = "somebody"

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def send_all(self, _data: bytes) -> None:
        await anyio.lowlevel.checkpoint()

    async def receive_some(self, limit: int) -> bytes:
        await anyio.lowlevel.checkpoint()
        part, self._data = self._data[:limit], self._data[limit:]
        return part


@pytest.mark.parametrize("kind", [Message, HopMessage, StopMessage, HolePunch, rpc_pb2.RPC])
@given(payload=st.binary(max_size=200), framed=st.booleans())
def test_any_bytes_are_a_protobuf_message_or_a_transfer_error(kind: Any, payload: bytes, framed: bool) -> None:
    data = bytes([len(payload) & 0x7F | 0x80, len(payload) >> 7]) + payload if framed else payload

    async def main() -> None:
        with contextlib.suppress(TransferError):
            await read_message(Received(data), kind)
        with contextlib.suppress(TransferError):
            reader = MessageReader(Received(data), kind)
            while await reader.next() is not None:
                pass

    anyio.run(main, backend="trio")


@pytest.mark.parametrize("spoilt", [0, 1, 2])
@given(mutations=MUTATIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pem_file_is_used_or_refused(authority: Any, spoilt: int, mutations: list[tuple[int, bytes]]) -> None:
    files = [Path(file) for file in authority.files("fuzzed", "worker")]
    original = files[spoilt].read_bytes()
    content = bytearray(original)
    for at, replacement in mutations:
        content[at % len(content) : at % len(content) + 2] = replacement
    files[spoilt].write_bytes(content)
    try:
        with contextlib.suppress(IdentityError):
            load_identity(*files)
    finally:
        files[spoilt].write_bytes(original)


@given(st.binary())
def test_any_dataset_record_is_found_or_ignored(value: bytes) -> None:
    async def main() -> None:
        async with MemoryNetwork().endpoint("node") as node:
            await node.put_record(b"digits", value)
            assert len(await dataset_directory.find_dataset(node, "digits")) <= 1

    anyio.run(main, backend="trio")


# --------------------------------------------------------------------------------------------------------- task streams

FRAMES = [
    (entry["name"], bytes.fromhex(entry["hex"]))
    for line in (Path(__file__).parents[2] / "hypha-proto" / "tests" / "own_wire.jsonl").read_text().splitlines()
    if (entry := json.loads(line))["kind"] == "frame"
]
MUTATED_FRAMES = 10_000


@pytest.mark.parametrize("kind", [SchedulerFrame, WorkerFrame])
def test_any_frame_of_a_task_stream_is_decoded_or_refused(kind: Any) -> None:
    chance, decoded = random.Random(1), 0
    frames = [data for name, data in FRAMES if name.startswith(kind.__name__)]
    for number in range(MUTATED_FRAMES):
        with contextlib.suppress(DecodeError):
            from_cbor(kind, mutated(frames[number % len(frames)], chance), MAX_FRAME)
            decoded += 1
    assert 0 < decoded < MUTATED_FRAMES


async def test_any_bytes_on_a_task_stream_are_reports_or_end_it() -> None:
    """Several frames behind their lengths, of which some are mutated; a channel raises its own error and no other."""
    chance, outcomes = random.Random(2), Counter[str]()
    frames = [data for name, data in FRAMES if name.startswith("WorkerFrame")]

    async def count(_report: StatusUpdate) -> None:
        outcomes["handled"] += 1

    for _ in range(MUTATED_FRAMES // 4):
        data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in chance.choices(frames, k=4))
        channel = MessageChannel[TaskDefinition, StatusUpdate](SchedulerCodec(), count, MAX_FRAME, next_wanted=7)
        for number in range(6):
            channel.send(TaskDefinition(attempt=AttemptId(uuid.UUID(int=number), "t", 0)))
        try:
            await channel.run(Received(mutated(data, chance)), 0)
        except ChannelError:
            outcomes["refused"] += 1
    assert min(outcomes["handled"], outcomes["refused"]) > 100, outcomes
