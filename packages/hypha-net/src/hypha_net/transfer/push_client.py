"""Client of the push protocol: announces a file, sends it from the byte that the receiver asks for, awaits a receipt.

The other side is `push_server`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import TransferError
from hypha_net.transfer.framing import (
    receive_message,
    refusal_error,
    reset_on_error,
    send_message,
)
from hypha_net.transfer.io.sources import Content, Source
from hypha_net.transfer.progress import TransferProgress
from hypha_net.transfer.retry import retry_with_deadline
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PUSH
from hypha_proto.transfer import PushAnswer, PushHeader, PushReceipt, Refusal

RECEIPT_TIMEOUT: Final = 600.0
"""Seconds that the peer may process a file before it sends its receipt; a dead peer is noticed sooner."""


async def push(
    endpoint: Endpoint, peer: PeerId, content: Content, header: PushHeader, *, timeout: float = 600.0
) -> int:
    """Push a file or bytes to `peer` and wait for its receipt; return the bytes sent, repeated ones included.

    Size and digest for the header come from `describe`.

    An interrupted push is resumed a few times, from the byte up to which the peer has it.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: the peer does not accept the push, and says why.
        TransferError: the stream broke off, the peer's answers are invalid, or `timeout` seconds have passed.
        OSError: the file cannot be read.
    """
    outgoing = _Push(endpoint, peer, Source(content), header)
    return await retry_with_deadline(outgoing.attempt, outgoing.what, outgoing.progress, timeout)


@dataclass(slots=True)
class _Push:
    endpoint: Endpoint
    peer: PeerId
    source: Source
    header: PushHeader
    progress: TransferProgress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = TransferProgress(self.endpoint, self.peer, self.header.name, "sent")

    @property
    def what(self) -> str:
        return f"push of {self.header.name} to {self.peer}"

    async def attempt(self) -> int:
        stream = await self.endpoint.open_stream(self.peer, [PUSH])
        async with reset_on_error(stream, self.what):
            await self._push_over(stream)
        return self.progress.total_moved

    async def _push_over(self, stream: Stream) -> None:
        await send_message(stream, to_cbor(PushHeader, instrumentation.with_trace(self.header)))
        answer = from_cbor(PushAnswer, await receive_message(stream))
        if isinstance(answer, Refusal):
            raise refusal_error(answer)
        size = self.header.size
        if answer.offset > size:
            raise TransferError(f"asked to go on from byte {answer.offset} of {size}")
        if (there := self.source.size()) != size:
            raise TransferError(f"{self.source} has changed: {there} bytes are not the {size} announced")
        self.progress.begin(answer.offset, size)
        await self.source.send(stream, answer.offset, size, self.progress)
        await stream.send_eof()
        receipt = from_cbor(PushReceipt, await receive_message(stream, RECEIPT_TIMEOUT))
        if isinstance(receipt, Refusal):
            raise refusal_error(receipt)
