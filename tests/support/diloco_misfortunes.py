"""Seeded faults of a simulated DiLoCo job: what goes wrong, where and when follows from the seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import ClassVar

import anyio

from hypha_proto.contributions import SampleRange
from hypha_scheduler.strategies.base import TaskEnded, TaskState
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, TRAIN
from support.diloco_network import Network, Node
from support.diloco_processes import Process, Training
from support.diloco_scheduler import Scheduler
from support.diloco_simulation import BATCH, digest_of

PHASES = {"NaN": "stated"} | dict.fromkeys(("foreign ranges", "stale weights", "replayed"), "sending")
"""Phases of those faults that happen in one alone."""
SPARE = 3
"""Workers beyond those that the job wants, so that it always finds others."""


class Misfortunes:
    """Faults at random times and phases; after the last one the job is left alone."""

    KINDS: ClassVar[tuple[str, ...]] = (
        "executor exits",
        "executor out of memory",
        "executor killed by memory limit",
        "executor without room",
        "worker killed",
        "worker leaves",
        "worker drains",
        "executor stopped",
        "worker cut off",
        "NaN",
        "foreign ranges",
        "stale weights",
        "replayed",
        "server killed",
        "server fails",
        "server drains",
        "server cut off",
        "scheduler dies",
    )

    def __init__(self, seed: int, faults: int | None = None, mean: float = 8.0, kinds: tuple[str, ...] = KINDS) -> None:
        """Prepare faults.

        Args:
            seed: of what happens.
            faults: number of them; random if None.
            mean: mean number of seconds between two.
            kinds: those that may happen.
        """
        self.random = Random(f"misfortunes/{seed}")
        self.seed = seed
        self.left = self.random.randint(3, 12) if faults is None else faults
        self.mean, self.kinds = mean, kinds
        self.seen: Counter[str] = Counter()
        self._due: str | None = None
        """Fault that happens to the next process that reaches a phase."""

    def network(self, table: DilocoJobConfig) -> Network:
        """Return a network where these faults happen."""
        wanted = table.resources.num_workers
        return Network(
            self.seed,
            table,
            workers=wanted + SPARE,
            servers=3,
            slowness=(1.0, 0.7, 1.5),
            answer_loss=self.random.choice([0.0, 0.0, 0.01]),
            on_phase=self._on_phase,
            during=self._happen,
            downtime=self._downtime,
            loses_power=0.3,
        )

    def _downtime(self, random: Random) -> float:
        return random.uniform(0.5, 5.0) if random.random() < 0.7 else random.uniform(125.0, 150.0)

    async def _happen(self, network: Network) -> None:
        while self.left > 0:
            await anyio.sleep(self.random.expovariate(1.0 / self.mean))
            kind = self.random.choice(self.kinds)
            if kind == "scheduler dies":
                self._note(kind)
                network.dies_after = len(network.journal) + self.random.randint(1, 8)
            else:
                self._due = kind
                while self._due is not None:
                    await anyio.sleep(0.5)
            self._keep_spares(network)

    def _note(self, kind: str) -> None:
        self.seen[kind] += 1
        self.left -= 1

    def _keep_spares(self, network: Network) -> None:
        """Add machines in place of those that were excluded or are gone."""
        for role, wanted in ((TRAIN, network.table.resources.num_workers + SPARE), (AGGREGATE, 3)):
            scheduler = network.scheduler
            excluded = set() if scheduler is None else self._excluded(scheduler)
            alive = [n for n in network.nodes.values() if n.role == role and n.is_alive and n.peer not in excluded]
            for _ in range(wanted - len(alive)):
                network.add_node(role)

    def _excluded(self, scheduler: Scheduler) -> set[object]:
        return {peer for request in scheduler.operator.role_requests() for peer in request.excluded}

    def _on_phase(self, phase: str, process: Process) -> None:
        kind = self._due
        if kind is None or self.random.random() < 0.7:
            return
        is_server = kind.startswith("server")
        if is_server == isinstance(process, Training) or phase != PHASES.get(kind, phase):
            return
        self._due = None
        self._note(kind)
        self._actions()[kind](process)

    def _actions(self) -> dict[str, Callable[[Process], None]]:
        return {
            "executor exits": lambda p: p.node.fail(self._failed(p, 1, "it exited")),
            "executor out of memory": lambda p: p.node.fail(self._failed(p, 75, "out of memory")),
            "executor killed by memory limit": lambda p: p.node.fail(
                self._failed(p, -9, "killed: it reached the memory limit of its lease")
            ),
            "executor without room": lambda p: p.node.fail(self._failed(p, 74, "no room on the disk")),
            "worker killed": lambda p: self._crash(p.node),
            "worker leaves": lambda p: p.node.leave(),
            "worker drains": lambda p: p.node.drain(),
            "executor stopped": self._stop,
            "worker cut off": lambda p: self._cut_off(p.node),
            "NaN": self._spoil,
            "foreign ranges": lambda p: self._lie(p, ranges=(SampleRange(90, 0, 0, BATCH),)),
            "stale weights": lambda p: self._lie(p, weights=digest_of("stale")),
            "replayed": lambda p: self._lie(p, round=1),
            "server killed": lambda p: self._crash(p.node),
            "server fails": lambda p: p.node.fail(self._failed(p, 1, "it exited")),
            "server drains": lambda p: p.node.drain(),
            "server cut off": lambda p: self._cut_off(p.node),
        }

    def _failed(self, process: Process, code: int, reason: str) -> TaskEnded:
        """Return an end with a last line of its own: the same error on two workers ends a job, whatever its numbers."""
        name = "".join(chr(ord("a") + int(digit)) for digit in str(process.network.number()))
        return TaskEnded(TaskState.FAILED, reason, code, (f"RuntimeError: {name}",))

    def _later(self, network: Network, longest: float, act: Callable[[], None]) -> None:
        seconds = self.random.uniform(0.1 * longest, longest)

        async def wait() -> None:
            await anyio.sleep(seconds)
            act()

        network.tasks.start_soon(wait)

    def _crash(self, node: Node) -> None:
        node.crash()
        self._later(node.network, 40.0, node.come_back)

    def _stop(self, process: Process) -> None:
        process.stop()
        self._later(process.network, 60.0, process.resume)

    def _cut_off(self, node: Node) -> None:
        def heal() -> None:
            node.is_reachable = True

        node.is_reachable = False
        self._later(node.network, 30.0, heal)

    def _spoil(self, process: Process) -> None:
        """Let the last update that a worker has stated hold NaN."""
        assert isinstance(process, Training)
        if process.executor.latest is not None:
            process.network.nan.add(process.executor.latest)

    def _lie(self, process: Process, **false: object) -> None:
        """Let a worker state what is not so; nobody knows the weights before the first round."""
        assert isinstance(process, Training)
        if process.executor.round > 1:
            process.network.lies[process.peer] = false
