"""Workers and schedulers of a simulation: real bidding, leases, auction and renewal; jobs are placed but not run.

    with seeded_ids(seed):
        simulate(main, seed=seed)

where `main` opens a `PlacementNetwork`, adds workers, and calls `place`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from unittest import mock

import anyio
import anyio.abc

from benchmarks.simulation.job import SERVER, TRAIN, Demand, Placement, place_job
from hypha_net.endpoint import Endpoint
from hypha_net.testing import Faults, MemoryEndpoint, MemoryNetwork
from hypha_proto.ids import PeerId
from hypha_proto.offers import REQUEST_BATCH_WINDOW
from hypha_proto.resources import Resources
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.bidder import Bidder
from hypha_worker.bidding.policy import OfferSection
from hypha_worker.leasing.capacity import Capabilities, Capacity
from hypha_worker.leasing.lease_manager import LeaseManager
from hypha_worker.service import Worker
from hypha_worker.tasks.output_server import OutputServer
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.task_run import TaskHost
from hypha_worker.tasks.task_sessions import TaskSessions

PRICE: Final = 50.0
"""Price of an honest worker, in tokens per lease-hour."""
FOUR_CORES: Final = Resources(cpu=4.0)
NEAR, FAR = 0.02, 0.08
"""Shortest and longest one-way delay of a link, seconds."""
PROCESSING: Final = 0.001
"""Processor time of a delivery, seconds."""
_NO_FAULTS: Final = Faults()


@contextmanager
def seeded_ids(seed: int) -> Iterator[None]:
    """Derive random identifiers and jitter from `seed`, so that a simulation can be repeated exactly."""
    generator = random.Random(f"ids/{seed}")

    def draw() -> uuid.UUID:
        return uuid.UUID(int=generator.getrandbits(128), version=4)

    state = random.getstate()
    random.seed(f"jitter/{seed}")
    try:
        with mock.patch("uuid.uuid4", draw):
            yield
    finally:
        random.setstate(state)


@dataclass(slots=True)
class PlacementNetwork:
    """A network of simulated workers, schedulers and cheats; opened by `open_placement_network`."""

    network: MemoryNetwork
    tasks: anyio.abc.TaskGroup
    workers: dict[PeerId, Worker] = field(default_factory=dict)
    """Honest workers."""
    schedulers: dict[PeerId, HeldLeases] = field(default_factory=dict)
    """Leases of honest schedulers, while their jobs exist."""
    _endpoints: list[MemoryEndpoint] = field(default_factory=list)
    _random: random.Random = field(init=False)
    _delays: tuple[float, float] = (NEAR, FAR)

    def __post_init__(self) -> None:
        self._random = random.Random(f"distances/{self.network.seed}")

    @property
    def messages(self) -> int:
        """Messages delivered so far: gossip, requests and answers."""
        return sum(endpoint.processor.handled for endpoint in self._endpoints)

    def delay_between(self, one: PeerId, other: PeerId) -> float:
        """Return the one-way delay of a link in seconds."""
        return self.network.links.between(one, other).delay

    @asynccontextmanager
    async def endpoint(self, name: str) -> AsyncIterator[MemoryEndpoint]:
        """Open an endpoint with a link of its own to every other."""
        async with self.network.endpoint(name) as endpoint:
            for other in self._endpoints:
                faults = replace(self.network.faults, delay=self._random.uniform(*self._delays))
                self.network.degrade(endpoint.peer_id, other.peer_id, faults)
            self._endpoints.append(endpoint)
            yield endpoint

    async def add_workers(self, count: int, capacity: Resources = FOUR_CORES) -> None:
        """Add honest workers that offer their capacity for `PRICE`."""
        for _ in range(count):
            await self.tasks.start(self._run_worker, f"worker-{len(self.workers)}", capacity)

    async def _run_worker(
        self, name: str, resources: Resources, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        async with self.endpoint(name) as endpoint, open_simulated_worker(endpoint, Capacity(resources)) as worker:
            self.workers[endpoint.peer_id] = worker
            task_status.started()
            await anyio.sleep_forever()

    async def add_cheat(self, name: str, run: Callable[[Endpoint], Awaitable[None]]) -> None:
        """Add a peer that runs `run` until the network is closed."""
        await self.tasks.start(self._run_cheat, name, run)

    async def _run_cheat(
        self,
        name: str,
        run: Callable[[Endpoint], Awaitable[None]],
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        async with self.endpoint(name) as endpoint:
            task_status.started()
            await run(endpoint)
            await anyio.sleep_forever()

    @asynccontextmanager
    async def place(self, name: str, demand: Demand) -> AsyncIterator[Placement]:
        """Place a job with a scheduler of its own; see `place_job`."""
        leases = HeldLeases()
        async with self.endpoint(name) as endpoint:
            self.schedulers[endpoint.peer_id] = leases
            try:
                async with place_job(endpoint, demand, leases) as placement:
                    yield placement
            finally:
                del self.schedulers[endpoint.peer_id]

    def least_seconds(self, scheduler: str, leases: int) -> float:
        """Return the shortest time in which the links allow `scheduler` to get `leases` leases.

        A request, the workers' batch window, an offer, a renewal and its answer, at the nearest honest workers. It
        neither counts processor time nor the time in which a connection is made.
        """
        endpoint = self.network.named(scheduler)
        assert endpoint is not None, scheduler
        delays = sorted(self.delay_between(endpoint.peer_id, worker) for worker in self.workers)
        return REQUEST_BATCH_WINDOW + 4 * delays[leases - 1]


@asynccontextmanager
async def open_simulated_worker(endpoint: MemoryEndpoint, capacity: Capacity) -> AsyncIterator[Worker]:
    """Run a worker as `hypha_worker.service.open_worker` does, without executors' processes and a work directory."""
    async with anyio.create_task_group() as tasks:
        capabilities = Capabilities(capacity, frozenset((TRAIN, SERVER)))
        lease_manager = LeaseManager(capacity)
        store = OutputStore(Path("/nonexistent"))
        sessions = TaskSessions(TaskHost(endpoint, lease_manager, Path("/nonexistent"), store), tasks)
        outputs = OutputServer(endpoint, store, lease_manager, tasks)
        arbiter = Arbiter(OfferSection(price=PRICE), capabilities)
        worker = Worker(endpoint, arbiter, lease_manager, sessions, outputs)
        worker.listen()
        await tasks.start(Bidder(endpoint, worker.arbiter, lease_manager, worker.sweep).run)
        tasks.start_soon(worker.sweep_loop)
        yield worker
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_placement_network(
    seed: int,
    *,
    processing: float = PROCESSING,
    delays: tuple[float, float] = (NEAR, FAR),
    faults: Faults = _NO_FAULTS,
) -> AsyncIterator[PlacementNetwork]:
    """Open a network.

    Args:
        processing: processor time of a delivery, seconds.
        delays: shortest and longest one-way delay of a link, seconds.
        faults: of every link, besides its delay.
    """
    network = MemoryNetwork(seed, replace(faults, delay=sum(delays) / 2), processing=processing)
    async with anyio.create_task_group() as tasks:
        yield PlacementNetwork(network, tasks, _delays=delays)
        tasks.cancel_scope.cancel()
