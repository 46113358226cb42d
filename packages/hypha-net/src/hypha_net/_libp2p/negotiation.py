"""Agreeing on a stream's protocol in one round trip, where py-libp2p's client takes two.

The greeting is not sent until the first protocol is, and both answers are read together. Other implementations see an
ordinary negotiation whose first two lines arrive at once, which all of them allow.
"""

from __future__ import annotations

from libp2p.io.exceptions import IOException
from libp2p.network.stream.net_stream import NetStream
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils import encode_delim


class OneRoundTrip(MultiselectCommunicator):
    """What the library's client writes and reads, the greeting put off."""

    def __init__(self, stream: NetStream) -> None:
        super().__init__(stream)
        self._held: bytes | None = b""
        """The greeting until it is sent; then none."""
        self._unanswered = False

    async def write(self, msg_str: str) -> None:
        """Send a line; the greeting, which is the first, goes with the second."""
        if self._held == b"":
            self._held = encode_delim(msg_str.encode())
            return
        line, self._held = (self._held or b"") + encode_delim(msg_str.encode()), None
        try:
            await self.read_writer.write(line)
        except IOException as error:
            raise MultiselectCommunicatorError("the connection broke off while a protocol was negotiated") from error

    async def read(self) -> str:
        """The next line. The answer to the greeting is taken for granted until it comes, and checked then."""
        if self._held:
            self._unanswered = True
            return MULTISELECT_PROTOCOL_ID
        if self._unanswered:
            self._unanswered = False
            answer = await super().read()
            if answer != MULTISELECT_PROTOCOL_ID:
                return answer
        return await super().read()
