"""Authorization by role: which roles may send which messages.

The table is `hypha_proto.protocols.ALLOWED_SENDERS`; the role is in the sender's certificate. Without a role a sender
may send everything, unless the node sets `require_roles`. Requests, streams, gossip and DHT records are checked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from hypha_net.events import Events, PeerRejected
from hypha_net.log_throttle import LogThrottle
from hypha_proto.ids import PeerId
from hypha_proto.protocols import ALLOWED_SENDERS

_log = logging.getLogger(__name__)


class RoleCheck:
    """Authorizes the peers of one endpoint."""

    def __init__(
        self, own: PeerId, role_of: Callable[[PeerId], str | None], events: Events, *, required: bool = False
    ) -> None:
        self._own = own
        self._role_of = role_of
        """Returns the role in a connected peer's certificate, if it has one."""
        self._events = events
        self._required = required
        self._refusals = LogThrottle(interval=math.inf)

    def is_authorized(self, peer: PeerId, what: str) -> bool:
        """Return whether `peer` may send `what`, a name of `ALLOWED_SENDERS`; emit a refusal, and log it once."""
        senders = ALLOWED_SENDERS.get(what)
        if senders is None or peer == self._own:
            return True
        role = self._role_of(peer)
        if role in senders or (role is None and not self._required):
            return True
        has = "has no role, and require_roles is set here" if role is None else f"has the role {role}"
        allowed = " or a ".join("data node" if each == "data" else each for each in sorted(senders))
        detail = f"{what} may be sent by a {allowed} only, and its certificate {has}"
        self._refusals.log(
            _log, logging.WARNING, (peer, what),
            "refused %s: %s; issue a certificate with --role, or find out who runs it", peer, detail,
        )  # fmt: skip
        self._events.emit(PeerRejected(peer, "role", detail))
        return False
