"""Any bytes from a peer or a file are read, or refused with the error that the caller handles."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libp2p.pubsub.pb import rpc_pb2

from hypha_net import dataset_directory
from hypha_net._libp2p.kad.messages import Message
from hypha_net._libp2p.relay.dcutr import HolePunch
from hypha_net._libp2p.relay.messages import HopMessage, StopMessage
from hypha_net._libp2p.wire.delimited import MessageReader, read_message
from hypha_net.errors import TransferError
from hypha_net.identity import IdentityError, load_identity
from hypha_net.testing import MemoryNetwork

MUTATIONS = st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=3)), min_size=1, max_size=4)


class Received:
    """A stream that delivers some bytes and ends."""

    protocol = "/test"

    def __init__(self, data: bytes) -> None:
        self._data = data

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
