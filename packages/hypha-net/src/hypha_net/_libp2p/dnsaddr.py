"""What ``/dnsaddr/<name>`` stands for: the multiaddrs in the TXT records of ``_dnsaddr.<name>``, wherever they lead on.

`dialer` asks here before it dials; what comes out holds addresses or host names, never another ``/dnsaddr``. Whoever
keeps the records decides what is dialled, so everything is bounded, and the dialler applies ``exclude_cidr`` to it.

The specification: https://github.com/multiformats/multiaddr/blob/master/protocols/DNSADDR.md
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio

from hypha_net.addresses import DNSADDR, split_peer
from hypha_net.errors import AddressError, UnreachableError
from hypha_proto.ids import PeerId

if TYPE_CHECKING:
    import dns.asyncresolver

_log = logging.getLogger("hypha_net.dialer")

TIMEOUT: Final = 5.0
"""Seconds for all look-ups of one address."""
MAX_RECORDS: Final = 16
"""Records of one name that are looked at, and addresses that are found in all."""
MAX_LOOK_UPS: Final = 16
MAX_DEPTH: Final = 4
"""Names that lead from one to the next; also the first counts."""
_PREFIX: Final = b"dnsaddr="


@dataclass(frozen=True, slots=True)
class Found:
    """An address that can be dialled."""

    transport: str
    """Without its ``/p2p/``."""
    peer: PeerId | None


@dataclass(frozen=True, slots=True)
class _Link:
    """A name to be asked about, and what its records have to end in."""

    name: str
    tail: str
    peer: PeerId | None
    depth: int = field(compare=False)

    @classmethod
    def of(cls, transport: str, peer: PeerId | None, depth: int) -> _Link:
        name, slash, tail = transport.removeprefix(DNSADDR).partition("/")
        return cls(name, slash + tail, peer, depth)

    def fits(self, transport: str, peer: PeerId | None) -> bool:
        return transport.endswith(self.tail) and self.peer in (None, peer)


class TextRecords:
    """Asks name servers: those given, as address and port, else the system's."""

    def __init__(self, servers: Sequence[tuple[str, int]] = ()) -> None:
        self._servers = servers

    async def find(self, address: str) -> list[Found]:
        """The addresses behind ``/dnsaddr/<name>``, with or without a port and ``/p2p/<id>`` that they have to end in.

        Raises:
            AddressError: it is no such address.
            UnreachableError: there are no such records, or no name server answers within `TIMEOUT`.
        """
        first = _Link.of(*split_peer(address), depth=1)
        found: dict[Found, None] = {}
        failures: list[str] = []
        with anyio.move_on_after(TIMEOUT) as scope:
            await self._follow(first, found, failures)
        if scope.cancelled_caught:
            failures.append(f"no answer within {TIMEOUT:g} s")
        if not found:
            why = "; ".join(dict.fromkeys(failures)) or f"no TXT record of _dnsaddr.{first.name} leads to a TCP address"
            raise UnreachableError(f"{address}: {why}{_ending(first)}")
        return list(found)[:MAX_RECORDS]

    async def _follow(self, first: _Link, found: dict[Found, None], failures: list[str]) -> None:
        """Collect what is found, the nearest first."""
        asked: set[_Link] = set()
        waiting = deque([first])
        while waiting and len(found) < MAX_RECORDS and len(asked) < MAX_LOOK_UPS:
            link = waiting.popleft()
            if link in asked:
                continue
            asked.add(link)
            try:
                texts = await self._texts(link.name)
            except UnreachableError as error:
                failures.append(str(error))
                continue
            for transport, peer in filter(lambda each: link.fits(*each), _split_all(texts)):
                if not transport.startswith(DNSADDR):
                    found[Found(transport, peer)] = None
                elif link.depth < MAX_DEPTH:
                    waiting.append(_Link.of(transport, peer, link.depth + 1))
                else:
                    failures.append(f"more than {MAX_DEPTH} names lead from one to the next")

    async def _texts(self, name: str) -> list[str]:
        """The multiaddrs in a name's records, unchecked."""
        import dns.asyncbackend  # takes as long as trio, and few nodes look up such an address
        import dns.exception
        import dns.name
        import dns.resolver

        asked = f"_dnsaddr.{name.rstrip('.')}"
        try:
            answer = await self._resolver().resolve(
                dns.name.from_text(f"{asked}."),
                "TXT",
                lifetime=TIMEOUT,
                backend=dns.asyncbackend.get_backend("trio"),
            )
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            raise UnreachableError(f"there is no TXT record dnsaddr=<multiaddr> at {asked}") from None
        except dns.exception.DNSException as error:
            raise UnreachableError(f"TXT records of {asked}: {error}") from error
        values = [b"".join(record.strings) for record in answer]
        texts = [value.removeprefix(_PREFIX).decode(errors="replace") for value in values if value.startswith(_PREFIX)]
        if not texts:
            raise UnreachableError(f"there is no TXT record dnsaddr=<multiaddr> at {asked}")
        if len(texts) > MAX_RECORDS:
            _log.warning("%s has %d addresses; %d of them are looked at", asked, len(texts), MAX_RECORDS)
        return texts[:MAX_RECORDS]

    def _resolver(self) -> dns.asyncresolver.Resolver:
        import dns.asyncresolver
        import dns.nameserver

        resolver = dns.asyncresolver.Resolver(configure=not self._servers)
        if self._servers:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in self._servers]
        return resolver


def _split_all(texts: Sequence[str]) -> list[tuple[str, PeerId | None]]:
    """Those of the texts that are TCP addresses or lead on, split; QUIC, circuits and rubbish are passed over."""
    made = []
    for text in texts:
        try:
            made.append(split_peer(text))
        except AddressError as error:
            _log.debug("a dnsaddr record is passed over: %s", error)
    return made


def _ending(link: _Link) -> str:
    peer = "" if link.peer is None else f"/p2p/{link.peer}"
    return f" (asked for those that end in {link.tail}{peer})" if link.tail or peer else ""
