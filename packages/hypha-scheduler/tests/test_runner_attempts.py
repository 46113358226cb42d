"""Registers of attempts and tasks: whatever order starts, ends and messages have, only running attempts are found."""

from __future__ import annotations

import itertools
import uuid

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from hypha_proto.attempt_id import AttemptId
from hypha_proto.commands import CommandAnswer
from hypha_proto.ids import PeerId
from hypha_proto.tasks import TaskSpec
from hypha_scheduler.jobs.attempt_register import AttemptError, AttemptRegister
from hypha_scheduler.strategies.base import Lease, TaskRef

PEERS = [PeerId.from_public_key(bytes([number]) * 32) for number in range(2)]
LEASES = [Lease(uuid.UUID(int=number), PEERS[number % 2], "train", 1.0) for number in range(4)]
JOB = uuid.UUID(int=9)
SPEC = TaskSpec(executor="train/any")


class AttemptsMachine(RuleBasedStateMachine):
    """Compares the attempts with a plain list of starts."""

    tasks = Bundle("tasks")

    @initialize()
    def begin(self) -> None:
        self.attempts = AttemptRegister()
        self.started: list[TaskRef] = []
        self.running: dict[uuid.UUID, TaskRef] = {}

    @rule(target=tasks, lease=st.sampled_from(LEASES), name=st.sampled_from("ab"), attempt=st.integers(0, 4))
    def start(self, lease: Lease, name: str, attempt: int) -> TaskRef:
        task = TaskRef(name, lease, attempt)
        newest = max((other.attempt for other in self.started if other.name == name), default=-1)
        if lease.id in self.running or attempt <= newest:
            with pytest.raises(AttemptError, match=f"task {name} cannot start"):
                self.attempts.register(task, SPEC)
            return task
        assert self.attempts.register(task, SPEC).task == task
        self.started.append(task)
        self.running[lease.id] = task
        return task

    @rule(task=tasks)
    def end(self, task: TaskRef) -> None:
        running = self.running.get(task.lease.id) == task
        attempt = self.attempts.get(task)
        assert self.attempts.runs(task) == running == (attempt is not None)
        assert self.attempts.record_end(task) == running
        if attempt is not None:
            assert attempt.ended.is_set()
            del self.running[task.lease.id]

    @invariant()
    def lookups_agree(self) -> None:
        for peer in PEERS:
            running = [task for task in self.running.values() if task.lease.peer == peer]
            assert (self.attempts.any_on(peer) in running) == bool(running)
            assert self.attempts.runs_on(peer) == bool(running)
            assert self.attempts.involves(peer) == any(task.lease.peer == peer for task in self.started)
            for name, number in itertools.product("ab", range(5)):
                named = AttemptId(JOB, name, number)
                newest = [task for task in self.started if task.name == name][-1:]
                known = [task for task in newest if (task.attempt, task.lease.peer) == (number, peer)]
                assert [self.attempts.started_at(peer, named)] == (known or [None])
                runs = [task for task in known if self.running.get(task.lease.id) == task]
                assert [self.attempts.running_at(peer, named)] == (runs or [None])
        for lease in LEASES:
            found = self.attempts.on(lease.id)
            assert (None if found is None else found.task) == self.running.get(lease.id)


TestAttempts = AttemptsMachine.TestCase


def test_an_adopted_attempt_is_confirmed_and_has_no_specification() -> None:
    attempts, task = AttemptRegister(), TaskRef("a", LEASES[0], 3)
    attempts.adopt(task)
    found = attempts.get(task)
    assert found is not None
    assert (found.spec, found.confirmed.is_set(), found.ended.is_set()) == (None, True, False)
    attempts.record_end(task)
    with pytest.raises(AttemptError, match="attempts at a task grow"):
        attempts.register(task, SPEC)


def test_an_answer_that_nobody_has_asked_for_is_not_kept() -> None:
    attempt = AttemptRegister().register(TaskRef("a", LEASES[0]), SPEC)
    attempt.add_answer(CommandAnswer(number=0, accepted=True))
    assert attempt.answers == {}
    attempt.commands = 1
    attempt.add_answer(CommandAnswer(number=0, accepted=True))
    assert list(attempt.answers) == [0]
