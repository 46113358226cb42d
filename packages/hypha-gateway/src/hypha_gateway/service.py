"""Gateway service: joins the topic on which schedulers request workers, so that gossip reaches all nodes.

The endpoint itself runs the DHT server and the relay in the role of a gateway. Through the topic, nodes that know only
this gateway exchange requests. `dataset_list` tells them which datasets are announced here.
"""

from __future__ import annotations

import logging
from typing import Final

from hypha_gateway.config import GatewayConfig
from hypha_gateway.dataset_list import DatasetList
from hypha_net import instrumentation, rpc
from hypha_net.endpoint import GossipMessage
from hypha_net.node.lifecycle import Node
from hypha_proto.dataset_listing import LIST_DATASETS
from hypha_proto.errors import DecodeError
from hypha_proto.offers import WORKER_REQUESTS

_log = logging.getLogger(__name__)

_REQUESTS: Final = instrumentation.Counter("hypha.gateway.requests", "{request}", "Requests for workers that passed.")


async def serve(config: GatewayConfig, node: Node) -> None:
    """Forward requests and list datasets until cancelled; ready as soon as the topic is joined."""
    if config.state_dir is None:
        _log.warning("state_dir is not set: after a restart datasets are unknown until they are announced again")
    rpc.serve(node.endpoint, LIST_DATASETS, DatasetList(node.endpoint).answer)
    async with node.endpoint.subscribe(WORKER_REQUESTS.name) as requests:
        node.readiness.ready()
        async for request in requests:
            _log.debug("request of %d bytes from %s passed on", len(request.data), request.source)
            if instrumentation.enabled():
                _record(request)


def _record(message: GossipMessage) -> None:
    _REQUESTS.add()
    try:
        request = WORKER_REQUESTS.decode(message.data)
    except DecodeError:
        return  # the workers that receive it report it
    with instrumentation.serving("pass request on", request, {"hypha.peer.id": str(message.source)}):
        pass  # the endpoint has forwarded it already: the span only marks the time
