"""Heartbeat records: signed, short-lived DHT records by which a publisher confirms that its record is still valid.

The DHT keeps one record per key. So that all of several publishers under one key are found, each also stores the value
under a key of its own, its heartbeat; the provider records of the shared key list the publishers.
"""

from __future__ import annotations

from typing import Final

from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

PREFIX: Final = b"/hypha/heartbeat/0.1.0/"
SIGNATURE: Final = 64
"""Length in bytes of the Ed25519 signature (RFC 8032) that precedes the value."""
_SIGNED: Final = b"hypha-heartbeat/0.1.0:"


def heartbeat_key(publisher: PeerId, key: bytes) -> bytes:
    """Return the DHT key of the heartbeat of `publisher` for its record under `key`."""
    return PREFIX + str(publisher).encode() + b"/" + key


def publisher_named(key: bytes) -> PeerId | None:
    """Return the only peer that may write under `key`, or None if `key` is not the key of a heartbeat.

    Raises:
        InvalidIdError: `key` has the prefix of a heartbeat but names no peer.
    """
    if not key.startswith(PREFIX):
        return None
    name, slash, _ = key[len(PREFIX) :].partition(b"/")
    if not slash or not name.isascii():
        raise InvalidIdError("the key of a heartbeat must name its publisher and the key of the record")
    return PeerId.parse(name.decode("ascii"))


def confirmed_key(key: bytes) -> bytes:
    """Return the key of the record that the heartbeat under `key` confirms; `key` itself if it is not a heartbeat's."""
    return key[len(PREFIX) :].partition(b"/")[2] if key.startswith(PREFIX) else key


def signed_bytes(publisher: PeerId, key: bytes, value: bytes) -> bytes:
    """Return the bytes that a publisher signs: its id, the length of `key` (u64, little endian), `key` and `value`."""
    return _SIGNED + publisher.raw + len(key).to_bytes(8, "little") + key + value


def split_heartbeat(data: bytes) -> tuple[bytes, bytes]:
    """Split a heartbeat into signature and value; the signature is empty if `data` is too short to hold one."""
    return (data[:SIGNATURE], data[SIGNATURE:]) if len(data) >= SIGNATURE else (b"", data)
