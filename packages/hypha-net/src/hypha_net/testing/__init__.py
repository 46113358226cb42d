"""In-memory network: the same `Endpoint` for many nodes in one process, with fault injection.

    network = MemoryNetwork(seed=1)
    async with network.endpoint("gateway") as gateway, network.endpoint("worker") as worker:
        await worker.connect(gateway.addresses[0])

No code here reads a wall clock: `simulate` runs the network on a virtual one, where an hour of leases passes at once.
Loss, delay, broken connections and the order of tasks come from seeded generators, so the same seed gives the same
history.
"""

from hypha_net.testing.fault_injection import Faults
from hypha_net.testing.memory_network import MemoryEndpoint, MemoryNetwork
from hypha_net.testing.simulation import simulate

__all__ = ["Faults", "MemoryEndpoint", "MemoryNetwork", "simulate"]
