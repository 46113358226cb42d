"""Names of peers for people: logs and texts show the name in a peer's certificate with the end of its id.

A process learns names in its TLS handshakes. They are for display, never for deciding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from hypha_proto.ids import PeerId, describe_peer

# not as a part of a multiaddr, which is copied whole
_PEER_ID: Final = re.compile(r"(?<![/\w])12D3KooW[1-9A-HJ-NP-Za-km-z]{44}(?!\w)")
_known: Final[dict[str, str]] = {}


def learn_name(peer: PeerId, name: str) -> None:
    """Remember the name in the certificate of a peer."""
    _known[str(peer)] = name


def known_name(peer: PeerId | str) -> str | None:
    """Return the name in the certificate of a peer, or None if this process has not seen it."""
    return _known.get(str(peer))


def name_peers(text: str, names: Mapping[str, str] = _known) -> str:
    """Return a text for people, with known peers named as `describe_peer` names them.

    A text that is only an id is data, and unchanged.
    """
    if _PEER_ID.fullmatch(text):
        return text
    return _PEER_ID.sub(lambda found: describe_peer(found[0], names[found[0]]) if found[0] in names else found[0], text)


def find_peer_ids(text: str) -> list[str]:
    """Return the peer ids in a text, those of multiaddrs apart."""
    return _PEER_ID.findall(text)
