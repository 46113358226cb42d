"""Register of attempts: whatever order dispatches, ends and messages have, only running attempts are found."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from hypha_proto.ids import PeerId
from hypha_scheduler.jobs.task_graph import TaskError
from hypha_scheduler.jobs.task_register import TaskRegister
from hypha_scheduler.strategies.base import Lease, TaskRef

PEERS = [PeerId.from_public_key(bytes([number]) * 32) for number in range(2)]
LEASES = [Lease(uuid.UUID(int=number), PEERS[number % 2], "train", 1.0) for number in range(4)]


class RegisterMachine(RuleBasedStateMachine):
    """Compares the register with a plain list of dispatches."""

    tasks = Bundle("tasks")

    @initialize()
    def begin(self) -> None:
        self.register = TaskRegister()
        self.dispatched: dict[uuid.UUID, list[TaskRef]] = {lease.id: [] for lease in LEASES}
        self.running: dict[uuid.UUID, TaskRef] = {}

    @rule(
        target=tasks,
        lease=st.sampled_from(LEASES),
        name=st.sampled_from("ab"),
        attempt=st.integers(0, 2),
        keep=st.booleans(),
    )
    def start(self, lease: Lease, name: str, attempt: int, keep: bool) -> TaskRef:
        task = TaskRef(name, lease, attempt)
        if lease.id in self.running or task in self.dispatched[lease.id]:
            with pytest.raises(TaskError, match=f"task {name} cannot start"):
                self.register.start(task, keep_lease=keep)
            return task
        assert self.register.start(task, keep_lease=keep) == len(self.dispatched[lease.id])
        self.dispatched[lease.id].append(task)
        self.running[lease.id] = task
        assert self.register.keeps_lease(task) == keep
        return task

    @rule(task=tasks)
    def end(self, task: TaskRef) -> None:
        running = self.running.get(task.lease.id) == task
        assert self.register.runs(task) == running
        assert self.register.end(task) == running
        if running:
            del self.running[task.lease.id]

    @rule(lease=st.sampled_from(LEASES), peer=st.sampled_from(PEERS), number=st.none() | st.integers(0, 6))
    def hear(self, lease: Lease, peer: PeerId, number: int | None) -> None:
        """Look up what a peer says about a dispatch on a lease: only the newest one may be running."""
        task = self.running.get(lease.id)
        newest = len(self.dispatched[lease.id]) - 1
        expected = task if peer == lease.peer and (number or 0) == newest else None
        assert self.register.dispatched(lease.id, peer, number) == expected
        assert self.register.of_peer(peer, lease.id) == (task if peer == lease.peer else None)

    @invariant()
    def lookups_agree(self) -> None:
        for peer in PEERS:
            running = [task for task in self.running.values() if task.lease.peer == peer]
            assert self.register.of_peer(peer) == (running[0] if len(running) == 1 else None)
            assert self.register.runs_on(peer) == bool(running)
            involved = any(task.lease.peer == peer for tasks in self.dispatched.values() for task in tasks)
            assert self.register.involves(peer) == involved
        for lease in LEASES:
            assert self.register.has_task(lease.id) == (lease.id in self.running)
            assert self.register.on(lease) == self.running.get(lease.id)
        assert set(self.register.running) == set(self.running.values())


TestRegister = RegisterMachine.TestCase


def test_a_peer_with_several_streamed_tasks_may_pull_for_any_of_them() -> None:
    register, [peer, _] = TaskRegister(), PEERS
    tasks = [TaskRef(name, lease, 1) for name, lease in zip("ab", LEASES[::2], strict=True)]
    register.start(tasks[0])
    assert register.streamed_on(peer) is None
    register.start(tasks[1], is_streamed=True)
    assert register.of_peer(peer) is None
    assert register.streamed_on(peer) == tasks[1]
    assert register.streamed_on(PEERS[1]) is None
