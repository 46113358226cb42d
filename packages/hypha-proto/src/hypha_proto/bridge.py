"""What an executor and its worker say to each other: JSON over HTTP on a Unix socket, one socket a job.

Two forms of body are understood, the one that executors in the field send (`{"resource": Reference, "path": …}`, or the
bare reference for a fetch) and the one of the user's documents (`{"fetch": {"type": "HuggingFace", …}, "out_dir": …}`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from hypha_proto.codec import from_plain
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.job import Reference
from hypha_proto.shapes import OMIT, U32, U64, Digest, Message

FETCH: Final = "/resources/fetch"
SEND: Final = "/resources/send"
RECEIVE: Final = "/resources/receive"
STATUS: Final = "/status/send"

_TYPES: Final = {"HuggingFace": "huggingface", "Peers": "peers", "Uri": "uri", "URI": "uri", "Scheduler": "scheduler"}
_ACTIONS: Final = {"fetch": "out_dir", "send": "path", "receive": "out_dir"}


class FetchedFile(Message, frozen=True):
    """One file that a fetch brought."""

    path: str
    """Relative to the work directory."""
    size: U64
    checksum: Digest
    metadata: dict[str, str]
    """`source`, `timestamp`; for a slice also `dataset`, `slice`, `epoch`."""


class ReceivedFile(Message, frozen=True):
    """One event of ``/resources/receive``."""

    path: str
    size: U64
    from_peer: PeerId
    sequence: U64
    round: Annotated[U32 | None, OMIT] = None
    kind: Annotated[str | None, OMIT] = None


class BridgeError(Message, frozen=True):
    """Body of every answer that is not a success."""

    error: str
    """Kind of the error, kebab-case, for programs."""
    detail: str
    """What happened and what to do, for people."""


class Transfer(Message, frozen=True):
    """A body of fetch, send or receive, whichever form it came in."""

    reference: Reference
    path: str
    """The file to send, or the folder to write to, relative to the work directory; empty when none was named."""
    round: U32 | None = None
    samples: U64 | None = None


def read_transfer(action: str, body: Any) -> Transfer:
    """Read a body of ``/resources/<action>`` (parsed JSON) in either form.

    Args:
        action: ``fetch``, ``send`` or ``receive``.

    Raises:
        DecodeError: the body fits neither form; the path says where.
    """
    if type(body) is not dict:
        raise DecodeError("expected an object")
    if "resource" in body and "type" not in body:
        reference, path = from_plain(Reference, body["resource"]), body.get("path", "")
    elif action in body:
        reference, path = from_plain(Reference, _documented(body[action])), body.get(_ACTIONS[action], "")
    elif action == "fetch" and "type" in body:
        reference, path = from_plain(Reference, _documented(body)), body.get("out_dir", "")
    else:
        raise DecodeError(f"expected {action!r} with {_ACTIONS[action]!r}, or 'resource' with 'path'")
    extras = from_plain(_Extras, body)
    if type(path) is not str:
        raise DecodeError("expected text", "path")
    return Transfer(reference=reference, path=path, round=extras.round, samples=extras.samples)


class _Extras(Message, frozen=True):
    round: U32 | None = None
    samples: U64 | None = None


def _documented(reference: Any) -> Any:
    """The reference of the user's documents as the wire writes it: lower-case type, strategy as a map."""
    if type(reference) is not dict:
        return reference
    made = dict(reference)
    if type(made.get("type")) is str:
        made["type"] = _TYPES.get(made["type"], made["type"])
    if type(made.get("strategy")) is str:
        made["strategy"] = {"type": made["strategy"]}
    return made
