"""The network in memory: the same `Endpoint`, many nodes in one process, with faults on demand.

    network = MemoryNetwork(seed=1)
    async with network.endpoint("gateway") as gateway, network.endpoint("worker") as worker:
        await worker.connect(gateway.addresses[0])

Nothing here knows a wall clock: run it under trio's `MockClock` and an hour of leases passes in a moment. Loss, delay
and partitions come from one seeded generator, so the same seed gives the same history.
"""

from hypha_net.testing.memory import Faults, MemoryEndpoint, MemoryNetwork

__all__ = ["Faults", "MemoryEndpoint", "MemoryNetwork"]
