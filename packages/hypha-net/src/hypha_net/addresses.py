"""Multiaddrs as text: validation, parsing, wildcards of listeners, and excluded networks.

See https://github.com/multiformats/multiaddr. Imports nothing of py-libp2p, whose import is slow.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import Final

from hypha_net.errors import AddressError
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.texts import quote

DNSADDR: Final = "/dnsaddr/"
"""Prefix of addresses that are resolved through the TXT records of a name."""
CIRCUIT: Final = "/p2p-circuit"
_NAMES: Final = ("dns", "dns4", "dns6", "dnsaddr")
_EXAMPLE: Final = "write one such as /ip4/203.0.113.50/tcp/4001"
_PORT_DIGITS: Final = 5
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def split_peer(address: str) -> tuple[str, PeerId | None]:
    """Split ``/ip4/…/tcp/…/p2p/<id>`` into transport address and peer id; ``/dnsaddr/<name>`` needs no port.

    Raises:
        AddressError: it is not a TCP multiaddr, or its peer id is malformed.
    """
    transport, found, peer = address.partition("/p2p/")
    _check_transport(address, transport, names=True)
    return transport, _parse_peer(address, peer) if found else None


def check_dial_address(text: str) -> str:
    """Return `text` if it can be dialled: what `split_peer` takes, or a circuit through a relay at such an address.

    Raises:
        AddressError: it cannot; the message says which part is wrong.
    """
    address, circuit, target = text.partition(CIRCUIT)
    _, relay = split_peer(address)
    if circuit and relay is None:
        raise AddressError(f"{text!r} does not name its relay: /p2p/<id> before {CIRCUIT}")
    if target:
        if not target.startswith("/p2p/"):
            raise AddressError(f"{text!r}: after {CIRCUIT} only /p2p/<peer id> may follow")
        _parse_peer(text, target.removeprefix("/p2p/"))
    return text


def check_listen_address(text: str) -> str:
    """Return `text` if it is a multiaddr to listen on: an IP address and a TCP port.

    Raises:
        AddressError: it is not.
    """
    _check_transport(text, text, names=False)
    return text


def _parse_peer(address: str, peer: str) -> PeerId:
    try:
        return PeerId.parse(peer)
    except InvalidIdError as error:
        raise AddressError(f"{address!r}: {error}") from None


def _check_transport(address: str, transport: str, *, names: bool) -> None:
    """Check the part of `address` before the peer id: a host, or with `names` also a name, and a TCP port."""
    parts = transport.split("/")
    if names and transport.startswith(DNSADDR) and len(parts) == 3:
        parts += ["tcp", "0"]  # the port is in the name's records
    if len(parts) < 5 or parts[0]:
        raise AddressError(f"{address!r} is not a multiaddr with host and port; {_EXAMPLE}")
    kind, host, protocol, port = parts[1:5]
    _check_host(address, kind, host, names=names)
    if protocol != "tcp":
        raise AddressError(f"{address!r}: transport {protocol!r} is not supported, only tcp; {_EXAMPLE}")
    if not (port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS and int(port) <= 65535):
        raise AddressError(f"{address!r}: {port!r} is not a TCP port (0 to 65535)")
    if len(parts) > 5:
        raise AddressError(f"{address!r}: /{parts[5]} does not belong after the port; {_EXAMPLE}")


def _check_host(address: str, kind: str, host: str, *, names: bool) -> None:
    if kind in _NAMES and names:
        try:
            validate_host_name(host)
        except ValueError as error:
            raise AddressError(f"{address!r}: {error}") from None
        return
    if kind not in ("ip4", "ip6"):
        allowed = "ip4, ip6, dns, dns4, dns6 or dnsaddr" if names else "ip4 or ip6"
        raise AddressError(f"{address!r} starts with {kind!r} instead of {allowed}; {_EXAMPLE}")
    try:
        ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host)
    except ValueError:
        raise AddressError(f"{address!r}: {host!r} is not an {kind} address") from None
    if "%" in host:
        raise AddressError(f"{address!r}: {host!r} is not an {kind} address: a multiaddr has no zone index (%)")


def validate_host_name(name: str) -> None:
    """Check that a host name is valid for the multiaddr codec and for the system's resolver, without a look-up.

    Raises:
        ValueError: the name is not valid; the message says why.
    """
    import idna  # imported late: most addresses are numeric, and the import would slow down every command

    try:
        idna.encode(name, uts46=True)
        name.encode("idna")  # the resolver's encoding: IDNA 2003, which is stricter in places
    except UnicodeError as error:
        raise ValueError(f"{quote(name)} is not a host name ({error}): use letters, digits and inner hyphens") from None


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
    import psutil  # imported late, for commands that only read a configuration

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
