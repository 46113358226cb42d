"""Validators for the multiaddrs in a configuration (https://github.com/multiformats/multiaddr).

They do not use the network engine, which is slow to import. Called by `models`.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from hypha_net.hostnames import validate_host_name
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_NAMES = ("dns", "dns4", "dns6", "dnsaddr")
_DNSADDR = "dnsaddr"
_EXAMPLE = "write one such as /ip4/203.0.113.50/tcp/4001"


def check_dial_address(text: str) -> str:
    """Return `text` if it is a multiaddr that can be dialled: host, TCP port, optionally ``/p2p/<id>``.

    ``/dnsaddr/<name>`` stands for the addresses in the name's TXT records, and needs no port.

    Raises:
        ValueError: it is not; the message says which part is wrong.
    """
    rest = _after_host(text, names=True)
    if rest and rest[0] == "p2p":
        if len(rest) < 2:
            raise ValueError(f"{text!r} ends in /p2p without a peer id")
        try:
            PeerId.parse(rest[1])
        except InvalidIdError as error:
            raise ValueError(f"{text!r}: {error}") from None
        rest = rest[2:]
        if rest and rest[0] == "p2p-circuit":
            return _check_circuit(text, rest[1:])
    if rest:
        raise ValueError(f"{text!r}: /{rest[0]} does not belong after the port; {_EXAMPLE}")
    return text


def _check_circuit(text: str, rest: list[str]) -> str:
    """Check what follows ``/p2p-circuit`` in `text`: nothing, or the peer at the other end."""
    if not rest:
        return text
    if rest[0] != "p2p" or len(rest) != 2:
        raise ValueError(f"{text!r}: after /p2p-circuit only /p2p/<peer id> may follow")
    try:
        PeerId.parse(rest[1])
    except InvalidIdError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return text


def check_listen_address(text: str) -> str:
    """Return `text` if it is a multiaddr to listen on: an IP address and a TCP port.

    Raises:
        ValueError: it is not.
    """
    if rest := _after_host(text, names=False):
        raise ValueError(f"{text!r}: a listen address ends with its port, not with /{rest[0]}")
    return text


def _after_host(text: str, *, names: bool) -> list[str]:
    """Return the parts that follow host and TCP port."""
    parts = text.split("/")
    if names and parts[:2] == ["", _DNSADDR] and len(parts) > 2 and parts[3:4] != ["tcp"]:
        _check_name(text, parts[2])
        return parts[3:]
    if len(parts) < 5 or parts[0]:
        raise ValueError(f"{text!r} is not a multiaddr with host and port; {_EXAMPLE}")
    kind, host, transport, port = parts[1:5]
    _check_host(text, kind, host, names=names)
    if transport != "tcp":
        raise ValueError(f"{text!r}: transport {transport!r} is not supported, only tcp; {_EXAMPLE}")
    if not (port.isascii() and port.isdigit() and len(port) <= len("65535") and int(port) < 65536):
        raise ValueError(f"{text!r}: {port!r} is not a TCP port (0 to 65535)")
    return parts[5:]


def _check_host(text: str, kind: str, host: str, *, names: bool) -> None:
    if kind in _NAMES and names:
        _check_name(text, host)
        return
    if kind not in ("ip4", "ip6"):
        allowed = "ip4, ip6, dns, dns4, dns6 or dnsaddr" if names else "ip4 or ip6"
        raise ValueError(f"{text!r} starts with {kind!r} instead of {allowed}; {_EXAMPLE}")
    try:
        IPv4Address(host) if kind == "ip4" else IPv6Address(host.replace("%", "/"))  # a multiaddr has no zone
    except ValueError:
        raise ValueError(f"{text!r}: {host!r} is not an {kind} address") from None


def _check_name(text: str, host: str) -> None:
    try:
        validate_host_name(host)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
