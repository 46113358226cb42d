"""Files by their SHA-256, in the DHT: the publisher of a record is a holder of the content.

A holder serves the content under the name in
`content_request`. A record proves nothing, so the puller verifies the digest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hypha_net.dataset_directory import RECORD_TTL, read_records
from hypha_net.endpoint import Endpoint
from hypha_proto.codec import to_json
from hypha_proto.datasets import ContentRecord
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest

MAX_HOLDERS: Final = 64
"""Maximum number of holders that are returned."""
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = "hypha-content:"


@dataclass(frozen=True, slots=True)
class ContentHolder:
    """A peer that claims to have some content, with its size in bytes."""

    peer: PeerId
    size: int


def is_sha256(text: str) -> bool:
    """Return whether text is a SHA-256: 64 lower-case hex digits."""
    return _HEX.fullmatch(text) is not None


def content_key(sha256: str) -> bytes:
    """Return the key of the records of some content."""
    return f"{_PREFIX}sha256:{sha256}".encode()


def content_request(sha256: str) -> PullRequest:
    """Return the request by which a holder is asked for some content."""
    return PullRequest(dataset=f"sha256:{sha256}", index=0)


async def announce_content(endpoint: Endpoint, sha256: str, size: int) -> None:
    """Publish that this endpoint holds some content; the endpoint renews the record while it is open.

    Raises:
        UnreachableError: no gateway stored the record.
    """
    record = to_json(ContentRecord, ContentRecord(size=size))
    await endpoint.put_record(content_key(sha256), record, ttl=RECORD_TTL)


async def find_holders(endpoint: Endpoint, sha256: str) -> list[ContentHolder]:
    """Find the holders of some content; empty when none is known.

    Raises:
        UnreachableError: no gateway answered.
    """
    records = await endpoint.find_records(content_key(sha256))
    found: dict[PeerId, ContentHolder] = {}
    for peer, record in read_records(ContentRecord, records, f"content {sha256}"):
        found.setdefault(peer, ContentHolder(peer, record.size))
    return list(found.values())[:MAX_HOLDERS]
