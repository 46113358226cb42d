"""Tasks that are to start once a journal record is on disk: their leases are in use."""

from __future__ import annotations

import uuid
from pathlib import Path

import anyio

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import AggregateConfig, AggregateJob, All, Descriptor, JobSpec, Nesterov, PeersReference
from hypha_scheduler.jobs.effect_queue import EffectQueue
from hypha_scheduler.jobs.journal import Journal
from hypha_scheduler.strategies.base import Effect, Lease, StartTask, TaskRef, WriteJournal

NOBODY = PeersReference(peers=(), strategy=All())
CONFIG = AggregateConfig(updates=NOBODY, results=NOBODY, optimizer=Nesterov(learning_rate=1.0, momentum=0.0))
SPEC = JobSpec(job_id=uuid.uuid4(), executor=AggregateJob(descriptor=Descriptor(name="x"), config=CONFIG))


def start(number: int) -> StartTask:
    lease = Lease(uuid.UUID(int=number), PeerId.from_public_key(bytes(32)), "train", 1.0)
    return StartTask(TaskRef(f"task-{number}", lease), SPEC)


def test_a_lease_is_in_use_from_the_request_to_start_a_task_on_it(tmp_path: Path) -> None:
    """Otherwise a demand that shrinks meanwhile releases the lease under the task."""
    done: list[Effect] = []

    async def main() -> None:
        with Journal(tmp_path / "journal.jsonl") as journal:
            queue = EffectQueue(journal, done.append, lambda error: None)
            first, second = start(1), start(2)
            queue.submit((WriteJournal("a", {}), first))
            assert done == []
            assert queue.will_start_on(first.task.lease.id)
            assert not queue.will_start_on(second.task.lease.id)
            with anyio.move_on_after(5):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(queue.run)
                    await queue.wait(queue.submit(()))
                    tasks.cancel_scope.cancel()
            assert done == [first]
            assert not queue.will_start_on(first.task.lease.id)

    anyio.run(main, backend="trio")
