"""Twins: two processes that use one certificate, found by a gateway from their calls.

A restarted process is no twin of the previous one, which no longer calls. Pure; the clock is passed in.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net.log_throttle import LogThrottle
from hypha_net.node.health import CALL_INTERVAL
from hypha_proto.health import Caller
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

_KEPT: Final = 3 * CALL_INTERVAL
"""Seconds for which a process is remembered after its last call."""
_MAX_PROCESSES: Final = 8
"""Maximum number of processes that are remembered for one certificate."""


@dataclass(slots=True)
class _Process:
    began: float
    first_call: float
    last_call: float
    address: str


@dataclass(slots=True)
class Twins:
    """The processes that have called lately, by the identity of their certificate."""

    clock: Callable[[], float] = anyio.current_time
    _known: OrderedDict[PeerId, dict[uuid.UUID, _Process]] = field(default_factory=OrderedDict)
    """The one that has called last at the end."""
    _logged: LogThrottle = field(init=False)

    def __post_init__(self) -> None:
        self._logged = LogThrottle(self.clock)

    def note(self, peer: PeerId, caller: Caller) -> str | None:
        """Note a call; return the address of an older process with this certificate that lives, and log both."""
        now = self.clock()
        self._forget(now - _KEPT)
        known = {key: each for key, each in self._known.pop(peer, {}).items() if each.last_call >= now - _KEPT}
        own = known.pop(caller.process, None) or _Process(now - caller.age_ms / 1000, now, now, caller.address)
        own.last_call = now
        # both live if each has called after the other was heard of first
        twins = [other for other in known.values() if other.last_call > own.first_call]
        kept = sorted(known.items(), key=lambda entry: entry[1].last_call)[1 - _MAX_PROCESSES :]
        self._known[peer] = {**dict(kept), caller.process: own}
        older = min(twins, key=lambda other: other.began, default=None)
        if older is None or older.began > own.began:
            return None
        self._logged.log(
            _log, logging.WARNING, peer,
            "two nodes use the certificate of %s: one at %s, and since later one at %s; make one for each with "
            "hypha-certutil node", peer, older.address, own.address,
        )  # fmt: skip
        return older.address

    def _forget(self, before: float) -> None:
        while self._known:
            peer, processes = next(iter(self._known.items()))
            if any(each.last_call >= before for each in processes.values()):
                return
            del self._known[peer]
