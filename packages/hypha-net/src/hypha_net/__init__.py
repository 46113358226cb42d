"""Networking of Hypha: identity, mutual TLS, the libp2p endpoint, file transfer, and the base of every daemon.

`open_endpoint` connects a node to the network; `endpoint.Endpoint` is the interface that everything else is built on:
`rpc`, `pubsub`, `dataset_directory` and `transfer`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from hypha_net.settings import EndpointSettings

if TYPE_CHECKING:
    from hypha_net._libp2p.endpoint import Libp2pEndpoint
    from hypha_net.identity import Identity

__all__ = ["EndpointSettings", "open_endpoint"]


@asynccontextmanager
async def open_endpoint(identity: Identity, settings: EndpointSettings) -> AsyncIterator[Libp2pEndpoint]:
    """Listen, connect to the gateways and stay connected while the context is open.

    Must run under trio. Gateways are dialled in the background until they answer: use `wait_for_gateway` to wait.
    py-libp2p is imported here, when it is first needed, because the import takes most of a second.

    Raises:
        AddressError: an address cannot be used.
        NetError: a listening port is in use.
    """
    from hypha_net._libp2p.endpoint import run_endpoint
    from hypha_net.bandwidth import limit_bandwidth

    async with run_endpoint(identity, settings) as endpoint:
        limit_bandwidth(endpoint, settings.rates)
        yield endpoint
