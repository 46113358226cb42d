"""Which generation of the wire a peer speaks, from the protocols that it announced by identify.

Called by `jobs.job_manager` and the parameter server, for what schedulers of the older network expect to be different.
"""

from __future__ import annotations

from hypha_net.endpoint import Endpoint
from hypha_proto.ids import PeerId
from hypha_proto.protocols import LEASE


def speaks_lease_protocol(endpoint: Endpoint, peer: PeerId) -> bool | None:
    """Return whether `peer` speaks ``/hypha-lease``, which all of our schedulers and none of the older network do.

    None if the peer is not connected, or before it has stated its protocols.
    """
    about = endpoint.connected_peers().get(peer)
    return None if about is None or not about.protocols else LEASE in about.protocols
