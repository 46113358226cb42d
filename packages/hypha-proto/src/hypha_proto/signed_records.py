"""Bytes by which a node says, again and again, that a record of its own in the directory still holds.

The directory keeps one record a key, for all peers to read. So that several nodes that publish under one key are all
found, each puts the same value a second time under a key of its own, its heartbeat, short-lived and signed; which nodes
those are, the key's provider records tell. `hypha_net.dataset_directory` announces and finds with it.
"""

from __future__ import annotations

from typing import Final

from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

PREFIX: Final = b"/hypha/heartbeat/0.1.0/"
SIGNATURE: Final = 64
"""Bytes of the Ed25519 signature that stands before the value."""
_SIGNED: Final = b"hypha-heartbeat/0.1.0:"


def heartbeat_key(publisher: PeerId, key: bytes) -> bytes:
    """Where `publisher` says that its record under `key` holds."""
    return PREFIX + str(publisher).encode() + b"/" + key


def publisher_named(key: bytes) -> PeerId | None:
    """Who alone may put a record under `key`, where that is a heartbeat's; none for every other key.

    Raises:
        InvalidIdError: it begins like a heartbeat's key, and names no peer.
    """
    if not key.startswith(PREFIX):
        return None
    name, slash, _ = key[len(PREFIX) :].partition(b"/")
    if not slash or not name.isascii():
        raise InvalidIdError("a heartbeat's key names its publisher and the record's key")
    return PeerId.parse(name.decode("ascii"))


def signed_bytes(publisher: PeerId, key: bytes, value: bytes) -> bytes:
    """What a publisher signs: itself, the record's own key behind its length (u64, little endian), and the value."""
    return _SIGNED + publisher.raw + len(key).to_bytes(8, "little") + key + value


def split_heartbeat(data: bytes) -> tuple[bytes, bytes]:
    """Signature and value of a heartbeat; an empty signature where it is too short for one."""
    return (data[:SIGNATURE], data[SIGNATURE:]) if len(data) >= SIGNATURE else (b"", data)
