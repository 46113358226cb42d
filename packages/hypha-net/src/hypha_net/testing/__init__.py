"""The network in memory: the same `Endpoint`, many nodes in one process, with faults on demand.

    network = MemoryNetwork(seed=1)
    async with network.endpoint("gateway") as gateway, network.endpoint("worker") as worker:
        await worker.connect(gateway.addresses[0])

Nothing here knows a wall clock: `simulate` runs it on a virtual one, where an hour of leases passes in a moment. Loss,
delay, breaks and the order of tasks come from seeded generators, so the same seed gives the same history.
"""

from hypha_net.testing.fault_injection import Faults
from hypha_net.testing.memory_network import MemoryEndpoint, MemoryNetwork
from hypha_net.testing.simulation import simulate

__all__ = ["Faults", "MemoryEndpoint", "MemoryNetwork", "simulate"]
