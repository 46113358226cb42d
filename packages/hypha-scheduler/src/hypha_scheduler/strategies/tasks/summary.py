"""What ``result.json`` says of a job of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from hypha_proto.ids import PeerId
from hypha_proto.tasks import StoredOutput
from hypha_scheduler.strategies.base import TrafficCounts
from hypha_scheduler.strategies.tasks.config import TasksJob
from hypha_scheduler.strategies.tasks.graph import Key
from hypha_scheduler.strategies.tasks.instances import Instance


def summarize(
    job: TasksJob,
    instances: Iterable[Instance],
    outputs: Mapping[Key, StoredOutput],
    paths: Mapping[Key, Path | None],
    traffic: Mapping[PeerId, TrafficCounts],
) -> dict[str, object]:
    """Return the tasks in the user's order, and the totals.

    Args:
        job: the job.
        instances: states of its instances.
        outputs: what was made.
        paths: where outputs are at the scheduler.
        traffic: bytes of files by worker.
    """
    by_name = {instance.name: instance for instance in instances}
    order = {table.name: index for index, table in enumerate(job.tasks)}
    listed = sorted(by_name.values(), key=lambda instance: (order[instance.task.name], instance.index))
    return {
        "name": job.name,
        "tasks": [_task(instance, outputs, paths) for instance in listed],
        "totals": {
            "tasks": len(listed),
            "attempts": sum(instance.attempts for instance in listed),
            "failures": sum(instance.failures for instance in listed),
            "losses": sum(instance.losses for instance in listed),
            "outputs": len(outputs),
            "bytes": sum(output.size for output in outputs.values()),
            "bytes_received": sum(counts.received or 0 for counts in traffic.values()),
        },
    }


def _task(
    instance: Instance, outputs: Mapping[Key, StoredOutput], paths: Mapping[Key, Path | None]
) -> dict[str, object]:
    keys = [(instance.name, output) for output in instance.task.table.outputs]
    return {
        "task": instance.name,
        "attempts": instance.attempts,
        "failures": instance.failures,
        "losses": instance.losses,
        "worker": None if instance.worker is None else str(instance.worker),
        "seconds": round(instance.seconds, 3),
        "outputs": {key[1]: _output(outputs[key], paths.get(key)) for key in keys if key in outputs},
    }


def _output(output: StoredOutput, path: Path | None) -> dict[str, object]:
    """Return where an output is, if it is at the scheduler, and what it is: a digest, or one for each of its files."""
    found: dict[str, object] = {
        "path": None if path is None else str(path),
        "size": output.size,
    }
    if output.is_file:
        return {**found, "digest": output.files[0].digest}
    return {**found, "files": [{"path": f.path, "size": f.size, "digest": f.digest} for f in output.files]}
