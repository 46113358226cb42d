"""Resolve ``/dnsaddr/<name>``: the multiaddrs in the TXT records of ``_dnsaddr.<name>``, followed recursively.

The result holds addresses or host names, never another ``/dnsaddr``. The owner of the records decides what is dialled,
so every step is bounded, and the dialer applies ``exclude_cidr`` to the result.

Specification: https://github.com/multiformats/multiaddr/blob/master/protocols/DNSADDR.md
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

_log = logging.getLogger("hypha_net.dial")

TIMEOUT: Final = 5.0
"""Seconds for all queries of one address."""
MAX_RECORDS: Final = 16
"""Records used of one name, and addresses returned in all."""
MAX_QUERIES: Final = 16
MAX_DEPTH: Final = 4
"""Length of a chain of names, the first included."""
_PREFIX: Final = b"dnsaddr="


@dataclass(frozen=True, slots=True)
class ResolvedAddress:
    """A TCP address that can be dialled."""

    transport: str
    """The address without its ``/p2p/`` part."""
    peer: PeerId | None
    """The peer that the record names."""


@dataclass(frozen=True, slots=True)
class _Query:
    """A name to query, and the suffix and peer that its records must have."""

    name: str
    suffix: str
    peer: PeerId | None
    depth: int = field(compare=False)

    @classmethod
    def parse(cls, transport: str, peer: PeerId | None, depth: int) -> _Query:
        name, slash, suffix = transport.removeprefix(DNSADDR).partition("/")
        return cls(name, slash + suffix, peer, depth)

    def matches(self, transport: str, peer: PeerId | None) -> bool:
        return transport.endswith(self.suffix) and self.peer in (None, peer)


class DnsaddrResolver:
    """Resolver of ``/dnsaddr`` over DNS."""

    def __init__(self, servers: Sequence[tuple[str, int]] = ()) -> None:
        """Query `servers` (address and port), or the system's name servers if there are none."""
        self._servers = servers

    async def resolve(self, address: str) -> list[ResolvedAddress]:
        """Return the addresses behind ``/dnsaddr/<name>``, those nearest in the chain of names first.

        A port and ``/p2p/<id>`` in `address` restrict the result to addresses that end in them.

        Raises:
            AddressError: `address` is malformed.
            UnreachableError: no record matches, or no name server answers within `TIMEOUT`.
        """
        first = _Query.parse(*split_peer(address), depth=1)
        found: dict[ResolvedAddress, None] = {}
        failures: list[str] = []
        with anyio.move_on_after(TIMEOUT) as scope:
            await self._follow(first, found, failures)
        if scope.cancelled_caught:
            failures.append(f"no answer within {TIMEOUT:g} s")
        if not found:
            why = "; ".join(dict.fromkeys(failures)) or f"no TXT record of _dnsaddr.{first.name} leads to a TCP address"
            raise UnreachableError(f"{address}: {why}{_describe_filter(first)}")
        return list(found)[:MAX_RECORDS]

    async def _follow(self, first: _Query, found: dict[ResolvedAddress, None], failures: list[str]) -> None:
        """Query names breadth first, and collect addresses in `found` and problems in `failures`."""
        done: set[_Query] = set()
        queue = deque([first])
        while queue and len(found) < MAX_RECORDS and len(done) < MAX_QUERIES:
            query = queue.popleft()
            if query in done:
                continue
            done.add(query)
            try:
                texts = await self._query_txt(query.name)
            except UnreachableError as error:
                failures.append(str(error))
                continue
            for transport, peer in filter(lambda each: query.matches(*each), _split_all(texts)):
                if not transport.startswith(DNSADDR):
                    found[ResolvedAddress(transport, peer)] = None
                elif query.depth < MAX_DEPTH:
                    queue.append(_Query.parse(transport, peer, query.depth + 1))
                else:
                    failures.append(f"more than {MAX_DEPTH} names lead from one to the next")

    async def _query_txt(self, name: str) -> list[str]:
        """Return the multiaddrs in a name's TXT records, unchecked."""
        import dns.asyncbackend  # takes as long to import as trio, and few nodes resolve such an address
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
            _log.warning("%s has %d addresses; the first %d are used", asked, len(texts), MAX_RECORDS)
        return texts[:MAX_RECORDS]

    def _resolver(self) -> dns.asyncresolver.Resolver:
        import dns.asyncresolver
        import dns.nameserver

        resolver = dns.asyncresolver.Resolver(configure=not self._servers)
        if self._servers:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in self._servers]
        return resolver


def _split_all(texts: Sequence[str]) -> list[tuple[str, PeerId | None]]:
    """Split the TCP and ``/dnsaddr`` addresses among `texts`; skip QUIC, circuits and malformed ones."""
    made = []
    for text in texts:
        try:
            made.append(split_peer(text))
        except AddressError as error:
            _log.debug("a dnsaddr record is skipped: %s", error)
    return made


def _describe_filter(query: _Query) -> str:
    """Describe the suffix to which a query is restricted, for an error; empty without one."""
    peer = "" if query.peer is None else f"/p2p/{query.peer}"
    return f" (asked for those that end in {query.suffix}{peer})" if query.suffix or peer else ""
