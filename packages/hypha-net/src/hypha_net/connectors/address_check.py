"""Which network addresses a job's downloads may connect to. Pure.

A name is resolved first, and then its addresses are checked. So neither another spelling (``127.1``, ``0x7f000001``,
``::ffff:127.0.0.1``) nor a name that resolves differently the next time evades the check.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
"""RFC 6052 and 8215: the last 32 bits are an IPv4 address."""
_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")
"""RFC 4291, 2.5.5.1, deprecated."""


def is_allowed_address(text: str, networks: Iterable[Network]) -> bool:
    """Return whether an address is public, or in one of the networks that the owner lists.

    Args:
        text: numeric address; a zone (``%eth0``) is ignored.
        networks: those that the owner lists.
    """
    listed = tuple(networks)
    return all(_is_public(address) or _is_listed(address, listed) for address in _embedded(_parse(text)))


def _parse(text: str) -> Address:
    return ipaddress.ip_address(text.partition("%")[0])


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:  # RFC 3879; ipaddress calls it global
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _is_listed(address: Address, networks: tuple[Network, ...]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _embedded(address: Address) -> list[Address]:
    """Return the addresses that packets to an address may reach: itself, or the IPv4 addresses that it stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address, address.sixtofour]
    if address.teredo is not None:
        return [address, *address.teredo]
    if any(address in network for network in _NAT64):
        return [_low_bits(address)]
    if address in _COMPATIBLE and int(address) > 1:
        return [_low_bits(address)]
    return [address]


def _low_bits(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def literal_networks(hosts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of the hosts that are numeric addresses; an owner who lists such a host allows it."""
    found: list[Network] = []
    for host in hosts:
        try:
            found.append(ipaddress.ip_network(host.strip("[]")))
        except ValueError:  # a name or a pattern
            continue
    return tuple(found)
