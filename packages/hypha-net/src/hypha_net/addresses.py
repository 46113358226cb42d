"""Multiaddrs as text: parsing, wildcards of listeners, and excluded networks.

See https://github.com/multiformats/multiaddr. Called by the dialer, the endpoint and the configuration; imports nothing
of py-libp2p.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import Final

import psutil

from hypha_net.errors import AddressError
from hypha_net.hostnames import validate_host_name
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

DNSADDR: Final = "/dnsaddr/"
"""Prefix of addresses that are resolved through a name's TXT records."""
_HOSTS: Final = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_PORT_DIGITS: Final = 5
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def split_peer(address: str) -> tuple[str, PeerId | None]:
    """Split ``/ip4/…/tcp/…/p2p/<id>`` into transport address and peer id; ``/dnsaddr/<name>`` needs no port.

    Raises:
        AddressError: it is not a TCP multiaddr, or its peer id is malformed.
    """
    transport, found, peer = address.partition("/p2p/")
    parts = transport.split("/")
    if transport.startswith(DNSADDR) and len(parts) == 3:
        parts += ["tcp", "0"]  # the port is in the name's records
    if len(parts) != 5 or parts[0] or parts[1] not in _HOSTS or parts[3] != "tcp":
        raise AddressError(f"{address!r} is not an address such as /ip4/203.0.113.5/tcp/4001 or /dns4/host/tcp/4001")
    _validate_host(address, parts[1], parts[2])
    port = parts[4]
    if not (port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS and int(port) <= 65535):
        raise AddressError(f"{address!r}: port {port!r} is not a number up to 65535")
    if not found:
        return transport, None
    try:
        return transport, PeerId.parse(peer)
    except InvalidIdError as error:
        raise AddressError(f"{address!r}: {error}") from None


def _validate_host(address: str, kind: str, host: str) -> None:
    try:
        if kind == "ip4":
            ipaddress.IPv4Address(host)
        elif kind == "ip6":
            ipaddress.IPv6Address(host)
            if "%" in host:
                raise ValueError("a zone index (%) is not supported in a multiaddr")
        else:
            validate_host_name(host)
    except ValueError as error:
        raise AddressError(f"{address!r}: {error}") from None


def expand_wildcards(addresses: Iterable[str]) -> tuple[str, ...]:
    """Replace ``0.0.0.0`` and ``::`` by the addresses of this machine's interfaces."""
    expanded: dict[str, None] = {}
    for address in addresses:
        parts = address.split("/")
        if parts[2] in ("0.0.0.0", "::"):
            for host in _interface_hosts(socket.AF_INET if parts[1] == "ip4" else socket.AF_INET6):
                expanded["/".join((*parts[:2], host, *parts[3:]))] = None
        else:
            expanded[address] = None
    return tuple(expanded)


def _interface_hosts(family: socket.AddressFamily) -> list[str]:
    found = [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == family
    ]
    public = [host for host in found if not ipaddress.ip_address(host).is_loopback]
    return [host for host in public if not ipaddress.ip_address(host).is_link_local] or found


def is_excluded(address: str, excluded: Sequence[Network]) -> bool:
    """Return whether an address is in an excluded network (`exclude_cidr`), which is not dialled."""
    parts = address.split("/")
    return len(parts) > 2 and parts[1] in ("ip4", "ip6") and is_excluded_host(parts[2], excluded)


def is_excluded_host(host: str, excluded: Sequence[Network]) -> bool:
    """Return whether an IP address is excluded; an IPv4-mapped IPv6 address counts as the IPv4 address."""
    found = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found.version == network.version and found in network for network in excluded)
