"""Tells connected peers when the protocols of this node change, by identify push.

Specification: https://github.com/libp2p/specs/blob/master/identify/README.md#identifypush. py-libp2p pushes when it
listens at a new address only. A peer that connects while a node starts, before its services have registered their
handlers, would never hear of these.
"""

from __future__ import annotations

from typing import Final

import anyio
import anyio.abc
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify_push.identify_push import push_identify_to_peers

DELAY: Final = 0.1
"""Seconds that further changes have to be told together: services register their handlers one after the other."""
_TIMEOUT: Final = 5.0


class ProtocolAnnouncer:
    """Announces the protocols of one host."""

    def __init__(self, host: BasicHost, tasks: anyio.abc.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks
        self._is_due = False

    def announce(self) -> None:
        """Tell the connected peers, if there are any, after `DELAY`."""
        if not self._is_due and self._host.get_connected_peers():
            self._is_due = True
            self._tasks.start_soon(self._push)

    async def _push(self) -> None:
        await anyio.sleep(DELAY)
        self._is_due = False
        with anyio.move_on_after(_TIMEOUT):
            await push_identify_to_peers(self._host)
