"""Job summary: the strategy's part of ``result.json``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypha_proto.ids import PeerId
from hypha_proto.training_reports import ROUND_SECONDS
from hypha_scheduler.strategies.base import TrafficCounts
from hypha_scheduler.strategies.diloco.restore import RestoredTraining
from hypha_scheduler.strategies.diloco.training_state import TrainingState


def summarize(
    training: TrainingState, workers: Iterable[PeerId], traffic: Mapping[PeerId, TrafficCounts]
) -> dict[str, object]:
    """Return rounds, samples, loss and unused slices of a finished job, and what each peer has done and how.

    Args:
        training: training state of the job.
        workers: training workers of the job.
        traffic: traffic of the job at peers; null is written for peers that do not state it, such as lost ones.
    """

    def of(peer: PeerId) -> dict[str, object]:
        carried = traffic.get(peer, TrafficCounts())
        return {"peer": str(peer), "bytes_sent": carried.sent, "bytes_received": carried.received}

    def seconds_of(peer: PeerId) -> dict[str, float] | None:
        stated = training.seconds.get(peer)
        return None if stated is None else {name: round(stated[name], 3) for name in ROUND_SECONDS}

    return {
        "rounds": training.rounds.closed,
        "samples": training.samples.total(),
        "workers": [
            of(peer)
            | {
                "samples": training.samples[peer],
                "batches": training.batches[peer],
                "micro_batch": training.micro_batches.get(peer),
                "seconds": seconds_of(peer),
            }
            for peer in workers
        ],
        "parameter_server": of(training.server),
        "loss": training.loss,
        "slices_set_aside": [
            {"slice": index, "providers": {str(failure.provider): failure.reason for failure in report.failures}}
            for index, report in sorted(training.set_aside.items())
        ],
    }


def summarize_restored(restored: RestoredTraining) -> dict[str, object]:
    """Return what a job has done whose rounds were all recorded by an earlier run of the scheduler."""
    workers = [
        {"peer": str(peer), "samples": restored.samples[peer], "batches": restored.batches[peer]}
        for peer in restored.workers
    ]
    return {
        "rounds": restored.closed,
        "samples": restored.samples.total(),
        "workers": workers,
        "loss": restored.loss,
        "slices_set_aside": [],
    }
