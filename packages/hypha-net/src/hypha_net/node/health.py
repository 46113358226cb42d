"""Health of a node: the answer to ``/hypha-health/0.0.1``, which `probe` requests.

A node is healthy if its program has called `Node.ready`, one of its gateways is connected (if it has any), and no older
process uses its certificate. A gateway finds such twins from the calls of both.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio

from hypha_net.log_throttle import LogThrottle

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_proto.health import Caller
    from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)


CALL_INTERVAL: Final = 20.0
"""Seconds between two calls of `call_gateways`, on average."""
CALL_TIMEOUT: Final = 5.0
GATEWAY_POLL: Final = 0.1
"""Seconds between looking whether a gateway is connected while none is."""
OUTAGE_POLL: Final = 1.0
"""Seconds between looking whether one still is."""
GATEWAY_WARNING: Final = 60.0
"""Seconds between two warnings while none is."""


class Readiness:
    """Whether the program is ready and the network is reached, and the reason while it is not."""

    def __init__(self, outage: str | None = None) -> None:
        """Begin while the program starts; `outage` is why the network is not reached."""
        self._reasons: dict[str, str | None] = {"network": outage, "twin": None, "program": "starting"}
        """What may be missing, the first that counts first, and why; None for what is there."""

    @property
    def is_ready(self) -> bool:
        """Whether the node is healthy."""
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """Why it is not; None if it is."""
        return next(filter(None, self._reasons.values()), None)

    def ready(self) -> None:
        """Note that the program is ready from now on."""
        self._set("program", None)

    def waiting(self, reason: str) -> None:
        """Note that the program is not ready from now on, because of `reason`."""
        self._set("program", reason)

    def note_network(self, outage: str | None) -> None:
        """Note why the network is not reached from now on, or that it is."""
        self._set("network", outage)

    def note_twin(self, address: str | None) -> None:
        """Note where an older process with this node's certificate is, or that there is none."""
        reason = address and (
            f"another node, at {address}, uses the same certificate, and peers reach only one of the two: "
            "make one for each with hypha-certutil node"
        )
        if reason != self._reasons["twin"]:
            self._set("twin", reason)
            if reason is not None:
                _log.error("%s", reason)

    def _set(self, what: str, reason: str | None) -> None:
        before = self.reason
        self._reasons[what] = reason
        if self.reason is None and before is not None:
            _log.info("ready")
        elif self.reason is not None and self.reason != before:
            _log.info("not ready: %s", self.reason)


def gateway_outage(endpoint: Endpoint) -> str | None:
    """Return that none of the configured gateways is connected, and why; None if one is, or if there are none."""
    gateways = endpoint.gateways()
    if not gateways or any(peer is not None for peer in gateways.values()):
        return None
    failures = endpoint.gateway_failures()
    why = "; ".join(f"{address}: {failures.get(address, 'not connected yet')}" for address in gateways)
    return f"0 of {len(gateways)} gateways: {why}"


async def watch_gateways(endpoint: Endpoint, readiness: Readiness) -> None:
    """Report the node as not healthy while none of its gateways is connected, and warn of it, until cancelled."""
    due = anyio.current_time() + GATEWAY_WARNING
    while endpoint.gateways():
        outage, now = gateway_outage(endpoint), anyio.current_time()
        readiness.note_network(outage)
        if outage is None:
            due = now + GATEWAY_WARNING
        elif now >= due:
            _log.warning("%s; check gateway_addresses, and that a gateway runs there", outage)
            due += GATEWAY_WARNING
        await anyio.sleep(OUTAGE_POLL if outage is None else GATEWAY_POLL)


async def call_gateways(endpoint: Endpoint, readiness: Readiness) -> None:
    """Tell the gateways periodically which process this is, and note the twin that they report, until cancelled."""
    from hypha_net import rpc
    from hypha_net.errors import NetError
    from hypha_proto.health import HEALTH_CHECK, Caller, HealthRequest

    process, began = uuid.uuid4(), anyio.current_time()
    while True:
        twin = None
        for gateway in {peer for peer in endpoint.gateways().values() if peer is not None}:
            age = int((anyio.current_time() - began) * 1000)
            caller = Caller(process=process, age_ms=age, address=next(iter(endpoint.addresses), "unknown")[:256])
            try:
                answer = await rpc.call(
                    endpoint, gateway, HEALTH_CHECK, HealthRequest(caller=caller), timeout=CALL_TIMEOUT
                )
            except NetError as error:
                _log.debug("gateway %s does not answer: %s", gateway, error)
            else:
                twin = twin or answer.twin
        readiness.note_twin(twin)
        await anyio.sleep(CALL_INTERVAL * (0.75 + random.random() / 2))


def serve_health(endpoint: Endpoint, readiness: Readiness, *, role: str, version: str) -> None:
    """Answer the health requests of all peers while the endpoint is open."""
    from hypha_net import rpc
    from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest

    twins = Twins()

    async def answer(peer: PeerId, request: HealthRequest) -> Health:
        twin = None if request.caller is None else twins.note(peer, request.caller)
        traffic = endpoint.traffic
        return Health(
            healthy=readiness.is_ready,
            role=role,
            version=version,
            reason=readiness.reason,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            time_ms=int(time.time() * 1000),
            twin=twin,
        )

    rpc.serve(endpoint, HEALTH_CHECK, answer)


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
    """The processes that have called lately, by the identity of their certificate.

    A restarted process is no twin of the previous one, which no longer calls.
    """

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
