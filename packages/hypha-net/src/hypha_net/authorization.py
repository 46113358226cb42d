"""Who may send what: a message is refused when its sender's certificate names a role that does not send such messages.

The table is `hypha_proto.protocols.SENDERS`. A certificate without a role passes, so that a network without roles
works, unless the node requires roles. `requests`, the endpoint's handlers, gossip and the directory ask here before
they act.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from hypha_net.events import Events, PeerRejected
from hypha_proto.ids import PeerId
from hypha_proto.protocols import ALLOWED_SENDERS

_log = logging.getLogger(__name__)

_MAX_TOLD: Final = 4096


class RoleCheck:
    """Decides for one endpoint."""

    def __init__(
        self, own: PeerId, role_of: Callable[[PeerId], str | None], events: Events, *, required: bool = False
    ) -> None:
        self._own = own
        self._role_of = role_of
        """The role in a connected peer's certificate, if there is one."""
        self._events = events
        self._required = required
        self._told: set[tuple[PeerId, str]] = set()

    def is_authorized(self, peer: PeerId, what: str) -> bool:
        """Whether `peer` may send `what`, a name of `SENDERS`; a refusal is told as an event, and logged once."""
        senders = ALLOWED_SENDERS.get(what)
        if senders is None or peer == self._own:
            return True
        role = self._role_of(peer)
        if role in senders or (role is None and not self._required):
            return True
        has = "names no role, and require_roles is set here" if role is None else f"names the role {role}"
        allowed = " or a ".join("data node" if each == "data" else each for each in sorted(senders))
        detail = f"{what} is for a {allowed} to send, and its certificate {has}"
        if (peer, what) not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add((peer, what))
            _log.warning("refused %s: %s; issue a certificate with --role, or look who that is", peer, detail)
        self._events.emit(PeerRejected(peer, "role", detail))
        return False
