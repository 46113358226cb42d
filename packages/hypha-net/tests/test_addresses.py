"""Multiaddrs as text, where malformed ones raise an error that names them, and long paths of Unix sockets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.gateways import open_node

from hypha_net.addresses import split_peer
from hypha_net.errors import AddressError
from hypha_net.node.config.models import NodeConfig

ODD_NAMES = {
    "an underscore": "my_host",
    "a hyphen in front": "-host",
    "an empty label": "a..b",
    "a label that is too long": "a" * 64,
    "a name that is too long": "a." * 150,
    "rubbish after xn--": "xn--a",
    "a direction that the resolver does not take": "א1",
    "nothing": "",
}
"""Names that the multiaddr codec or the system's resolver refuses, each with its own errors."""


@pytest.mark.parametrize("why", ODD_NAMES)
def test_an_invalid_host_name_is_refused(why: str) -> None:
    address = f"/dns4/{ODD_NAMES[why]}/tcp/4001"
    with pytest.raises(AddressError, match="/dns4/"):
        split_peer(address)
    with pytest.raises(ValidationError, match="gateway_addresses"):
        NodeConfig(cert_pem="c", key_pem="k", trust_pem="t", gateway_addresses=[address])


@pytest.mark.parametrize(
    "name", ["localhost", "gw.example", "gw.example.", "GW", "münchen.example", "xn--mnchen-3ya.de"]
)
def test_common_host_names_are_accepted(name: str) -> None:
    address = f"/dns4/{name}/tcp/4001"
    assert split_peer(address) == (address, None)
    config = NodeConfig(cert_pem="c", key_pem="k", trust_pem="t", gateway_addresses=[address])
    assert config.gateway_addresses == [address]


@pytest.mark.parametrize("port", ["", "x", "-1", "65536", "²", "٣", "1" * 5000])
def test_a_port_that_is_not_plain_digits_is_refused(port: str) -> None:
    with pytest.raises(AddressError, match="is not a TCP port"):
        split_peer(f"/ip4/192.0.2.1/tcp/{port}")


def test_an_address_with_a_zone_index_is_refused() -> None:
    with pytest.raises(AddressError, match="zone index"):
        split_peer("/ip6/fe80::1%eth0/tcp/4001")
    with pytest.raises(ValidationError, match="is not an ip6 address"):
        NodeConfig(cert_pem="c", key_pem="k", trust_pem="t", gateway_addresses=["/ip6/fe80::1%eth0/tcp/4001"])


async def test_dialling_an_invalid_host_name_is_an_address_error(authority: Any) -> None:
    async with open_node(authority, "node") as node:
        with pytest.raises(AddressError, match="my_host"):
            await node.connect("/dns4/my_host/tcp/4001")
