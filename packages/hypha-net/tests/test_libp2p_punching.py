"""Direct ways past a relay lead to no place that the operator has excluded, whatever a peer calls it."""

from __future__ import annotations

from typing import Any

import pytest
from bounded_waits import run, until
from loopback_ports import free_port

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p import punching
from hypha_net.events import HolePunched

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@pytest.mark.parametrize(("excluded", "outcome"), [("127.0.0.0/8", "failed"), ("10.0.0.0/8", "direct")])
def test_a_name_that_a_peer_reports_is_no_way_around_exclude_cidr(
    authority: Any, monkeypatch: pytest.MonkeyPatch, excluded: str, outcome: str
) -> None:
    monkeypatch.setattr(punching, "PUNCH_TIMEOUT", 0.3)

    async def main() -> None:
        port = free_port()
        settings = EndpointSettings((LOOPBACK,), role="gateway")
        async with open_endpoint(authority.identity("gateway", "gateway"), settings) as gateway:
            joined = (gateway.addresses[0],)
            named = EndpointSettings(
                (f"/ip4/127.0.0.1/tcp/{port}",), (f"/dns4/localhost/tcp/{port}",), gateway_addresses=joined
            )
            asked_out = EndpointSettings(gateway_addresses=joined, exclude_cidr=(excluded,))
            async with (
                open_endpoint(authority.identity("named"), named) as target,
                open_endpoint(authority.identity("careful"), asked_out) as careful,
            ):
                for node in (target, careful):
                    await until(lambda node=node: any("p2p-circuit" in each for each in node.addresses))  # type: ignore[misc]
                with careful.events.follow(HolePunched) as punched:
                    await target.connect(careful.addresses[0])
                    told = await anext(aiter(punched))
                assert isinstance(told, HolePunched)
                assert (told.peer, told.outcome) == (target.peer_id, outcome)
                assert careful.is_direct(target.peer_id) is (outcome == "direct")

    run(main)
