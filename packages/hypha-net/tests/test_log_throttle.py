"""Repeated log lines are throttled: refusals of one peer, an unreachable gateway."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.gateways import LOOPBACK, open_gateway, open_node
from support.loopback_ports import free_port
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net.errors import RefusedError
from hypha_net.log_throttle import MAX_KEPT, LogThrottle, OutageLogSchedule


def test_a_message_is_logged_once_a_minute_with_the_suppressed_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    throttle = LogThrottle(lambda: now)

    def logged(*keys: object) -> list[str]:
        caplog.clear()
        for key in keys:
            throttle.log(logging.getLogger("test"), logging.WARNING, key, "%s refused", key)
        return caplog.messages

    assert logged("a", "a", "a", "b") == ["a refused", "b refused"]
    now += 59
    assert logged("a") == []
    now += 2
    assert logged("a", "a") == ["a refused (3 more since it was last logged)"]
    logged(*range(2 * MAX_KEPT))
    assert len(throttle) == MAX_KEPT


def test_an_outage_is_logged_at_growing_intervals() -> None:
    now = 0.0
    absence = OutageLogSchedule(lambda: now)
    told = []
    for second in range(0, 12_000, 2):
        now = float(second)
        if absence.is_due("silent"):
            told.append(second)
    assert told == [0, 60, 360, 1260, 4860, 8460]
    assert absence.is_due("refused")
    assert not absence.is_due("refused")
    assert not absence.is_due("silent")
    assert absence.seconds == now


async def test_an_unreachable_gateway_is_logged_once_and_its_return_once(authority: Any, caplog: Any) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    with caplog.at_level(logging.DEBUG, "hypha_net.gateways"):
        async with open_node(
            authority, "leaf", "worker", listen_addresses=(LOOPBACK,), gateway_addresses=(address,)
        ) as leaf:
            await until(lambda: sum("gateway /ip4" in record.getMessage() for record in caplog.records) >= 3, 30)
            async with open_endpoint(
                authority.identity("gateway", "gateway"), EndpointSettings((address,), role="gateway")
            ):
                await until(lambda: leaf.connected_peers(), 30)
                await until(lambda: "s without it" in caplog.text, 30)
    levels = [record.levelno for record in caplog.records if "gateway /ip4" in record.getMessage()]
    assert levels[0] == logging.WARNING
    assert set(levels[1:]) == {logging.DEBUG}
    (back,) = [record.getMessage() for record in caplog.records if "connected to gateway" in record.getMessage()]
    assert address in back


async def test_repeated_refusals_of_a_peer_are_logged_once_on_each_side(
    authority: Any, foreign_authority: Any, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        async with (
            open_gateway(authority) as gateway,
            open_endpoint(foreign_authority.identity("stranger", "worker"), EndpointSettings()) as stranger,
        ):
            for _ in range(4):
                with pytest.raises(RefusedError):
                    await stranger.connect(gateway.addresses[0])
    told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert sum(text.startswith("connection from") for text in told) == 1
    assert sum(text.startswith("connection to") for text in told) == 1
