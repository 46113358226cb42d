"""Validated identifiers: peer ids, content digests, and paths inside a folder.

A `PeerId` is the libp2p peer id of an Ed25519 key: the identity multihash of the key's protobuf encoding
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md). Hypha networks use no other kind of peer id, so
every other kind is rejected when it is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Final

from hypha_proto.errors import InvalidIdError
from hypha_proto.texts import quote

_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES: Final = {letter: value for value, letter in enumerate(_ALPHABET)}
# identity multihash (0x00) of 36 bytes: protobuf field 1 = key type 1 (Ed25519), field 2 = 32 bytes of key
_PREFIX: Final = bytes.fromhex("0024080112 20".replace(" ", ""))
_RAW_LENGTH: Final = len(_PREFIX) + 32
_TEXT_LIMIT: Final = 64
_MAX_NAME: Final = 64
NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""Names of tasks, resources and outputs."""
_SHOWN: Final = 6
"""Last characters of an id that are shown with a name."""


@lru_cache(4096)
def base58_encode(data: bytes) -> str:
    """Encode bytes in the Bitcoin base58 alphabet, leading zero bytes as ``1``."""
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def base58_decode(text: str) -> bytes:
    """Decode base58 text.

    Raises:
        InvalidIdError: a character is not in the alphabet, or the text is longer than any peer id.
    """
    if len(text) > _TEXT_LIMIT:
        raise InvalidIdError(f"base58 text of {len(text)} characters is longer than {_TEXT_LIMIT}")
    number = 0
    for letter in text:
        try:
            number = number * 58 + _VALUES[letter]
        except KeyError:
            raise InvalidIdError(f"{letter!r} is not a base58 character") from None
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


class PeerId:
    """Peer id of a node: its Ed25519 public key in libp2p's encoding. Immutable, hashable, ordered by its bytes."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        """Create a peer id from the 38 bytes of its multihash.

        Raises:
            InvalidIdError: `raw` is not the peer id of an Ed25519 key.
        """
        if len(raw) != _RAW_LENGTH or not raw.startswith(_PREFIX):
            raise InvalidIdError(
                "not the peer id of an Ed25519 key (a multihash of 38 bytes that starts with 002408011220)"
            )
        self._raw = bytes(raw)

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """Parse a peer id in base58 (``12D3KooW…``).

        Raises:
            InvalidIdError: `text` is not such a peer id.
        """
        try:
            return cls(base58_decode(text))
        except InvalidIdError as error:
            raise InvalidIdError(f"peer id {quote(text)}: {error}") from None

    @classmethod
    def from_public_key(cls, key: bytes) -> PeerId:
        """Create the peer id of a raw Ed25519 public key.

        Raises:
            InvalidIdError: `key` is not 32 bytes long.
        """
        return cls(_PREFIX + key)

    @property
    def raw(self) -> bytes:
        """Multihash bytes (38), the form used on the wire."""
        return self._raw

    @property
    def public_key(self) -> bytes:
        """Raw Ed25519 public key, 32 bytes."""
        return self._raw[len(_PREFIX) :]

    def __str__(self) -> str:
        return base58_encode(self._raw)

    def __repr__(self) -> str:
        return f"PeerId({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerId) and other._raw == self._raw

    def __lt__(self, other: PeerId) -> bool:
        return self._raw < other._raw

    def __hash__(self) -> int:
        return hash(self._raw)


def describe_peer(peer: PeerId | str, name: object = None) -> str:
    """Return how a peer is shown to people: the name in its certificate, if it is known, and the end of its id.

    The name is cut to 64 characters; those that would control a terminal are replaced.
    """
    return f"{printable_name('' if name is None else str(name))}…{str(peer)[-_SHOWN:]}"


def printable_name(name: str) -> str:
    """Return a certificate's name for display: at most 64 characters, none of which controls a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:_MAX_NAME])


DIGEST: Final = r"(blake3|sha256):[0-9a-f]{64}"
"""Content digests."""


def check_digest(text: str) -> str:
    """Return `text` if it is a content digest: ``blake3:`` or ``sha256:`` followed by 64 lower-case hex digits.

    Raises:
        InvalidIdError: `text` is not a digest.
    """
    if not re.fullmatch(DIGEST, text):
        raise InvalidIdError(f"{quote(text)} is not a digest such as blake3:<64 hex digits>")
    return text


MAX_PATH: Final = 255
"""Maximum number of bytes in a path inside an output or a resource."""


def is_inside(path: str) -> bool:
    """Return whether a path names something inside its folder: relative, with no way up and no null byte."""
    parsed = PurePosixPath(path)
    return bool(parsed.parts) and not parsed.is_absolute() and ".." not in parsed.parts and "\0" not in path


def find_path_fault(paths: Iterable[str]) -> str | None:
    """Return why paths are not those of separate files inside one folder; None if they are."""
    ordered = sorted(paths, key=lambda path: PurePosixPath(path).parts)
    for path in ordered:
        if not is_inside(path):
            return f"{quote(path)}, which is not inside its folder"
        if len(path.encode(errors="surrogatepass")) > MAX_PATH:
            return f"{quote(path)}, which is longer than {MAX_PATH} bytes"
    for outer, inner in pairwise(ordered):
        if PurePosixPath(inner).is_relative_to(outer):
            return f"{quote(outer)} and {quote(inner)}, which overlap"
    return None
