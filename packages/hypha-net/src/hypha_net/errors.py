"""Errors of this package, and the errors inside exception groups and chains of causes.

`_libp2p` translates errors of py-libp2p and of the system to these. Task groups wrap the errors of their tasks, and
py-libp2p wraps those of the system; logs and reports name the error inside.
"""

from __future__ import annotations

from collections.abc import Iterator


class NetError(Exception):
    """Base of the errors this package raises."""


class IdentityError(NetError):
    """A certificate, key, trust bundle or CRL cannot be used; the message names the file and the remedy."""


class AddressError(NetError, ValueError):
    """A multiaddr is malformed or of an unsupported kind."""


class UnreachableError(NetError):
    """A peer could not be reached at any address: no route, connection refused, or timeout."""


class NotRunningError(UnreachableError):
    """A peer's process has ended: no process listens at its addresses, and no relay is connected to it."""


class NotReservedError(UnreachableError):
    """A relay is not connected to a peer: the peer has ended, or has lost its connection."""


class RefusedError(UnreachableError):
    """A peer was reached, but one side rejected the other: wrong CA, revoked, wrong peer id, no common protocol."""


class UnsupportedProtocolError(NetError):
    """The peer speaks none of the offered protocols."""


class StreamClosedError(NetError):
    """This side closed the stream, or the endpoint was closed."""


class StreamResetError(NetError):
    """The stream was reset or its connection lost: the data received so far is incomplete."""


class RequestError(NetError):
    """A request got no valid answer."""


class RequestTimeoutError(RequestError):
    """No answer within the deadline."""


class MessageTooLargeError(RequestError):
    """A message exceeds the size limit of its protocol."""


class TransferError(NetError):
    """A file was not transferred: interrupted, wrong length, wrong digest, or no space left."""


class ContentMismatchError(TransferError):
    """The peer's content has another digest or length than requested. It would send the same again."""


class NoSpaceError(TransferError):
    """There is no space left for the file on this machine, whichever peer sends it."""


class TransferRefusedError(TransferError):
    """The peer does not accept or provide this file; `reason` is the text it sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"refused by the peer: {reason}")
        self.reason = reason


def leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested exception groups; `error` itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaf_errors(inner)
    else:
        yield error


def first_leaf_error(error: Exception) -> Exception:
    """Return the first error inside nested exception groups; `error` itself if it is no group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost cause: the first error of each group and the `__cause__` of each error, to the end."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


def describe_root_cause(error: BaseException) -> str:
    """Describe the innermost cause, as `root_cause` finds it."""
    cause = root_cause(error)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__
