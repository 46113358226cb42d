"""What can go wrong between two nodes. Errors of the engine below are translated to these at its seam."""

from __future__ import annotations


class NetError(Exception):
    """Base of the errors this package raises."""


class IdentityError(NetError):
    """A certificate, key, trust bundle or CRL cannot be used; the message names the file and the remedy."""


class AddressError(NetError, ValueError):
    """A multiaddr is malformed or of a kind that Hypha does not dial."""


class UnreachableError(NetError):
    """A peer could not be reached at any address: no route, refused, or timed out."""


class RefusedError(UnreachableError):
    """A peer was reached, but one side refused the other: wrong CA, revoked, wrong peer id, no shared protocol."""


class StreamDroppedError(UnreachableError):
    """A connected peer reset a stream before it said which protocol it takes: it may take the next one."""


class UnsupportedProtocolError(NetError):
    """The peer speaks none of the protocols that were offered."""


class StreamClosedError(NetError):
    """This side closed the stream, or the endpoint was shut down."""


class StreamResetError(NetError):
    """The stream or its connection broke off: what was read so far is not complete."""


class RequestError(NetError):
    """A request got no usable answer."""


class RequestTimeoutError(RequestError):
    """No answer within the deadline."""


class MessageTooLargeError(RequestError):
    """A message is over the limit of its protocol."""


class TransferError(NetError):
    """A file did not arrive whole: cut, wrong length, wrong digest, or no room."""


class TransferRefusedError(TransferError):
    """The other side does not take or give this file; `reason` is its own word."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"refused by the peer: {reason}")
        self.reason = reason
