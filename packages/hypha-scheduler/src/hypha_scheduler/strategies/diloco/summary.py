"""Job summary: the strategy's part of ``result.json``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import TrafficCounts
from hypha_scheduler.strategies.diloco.training_state import TrainingState


def summarize(
    training: TrainingState, workers: Iterable[PeerId], traffic: Mapping[PeerId, TrafficCounts]
) -> dict[str, object]:
    """Return rounds, samples, loss and unused slices of a finished job, and the samples and traffic of each peer.

    Args:
        training: training state of the job.
        workers: training workers of the job.
        traffic: traffic of the job at peers; null is written for peers that do not state it, such as lost ones.
    """

    def of(peer: PeerId) -> dict[str, object]:
        carried = traffic.get(peer, TrafficCounts())
        return {"peer": str(peer), "bytes_sent": carried.sent, "bytes_received": carried.received}

    return {
        "rounds": training.rounds.closed,
        "samples": training.samples.total(),
        "workers": [
            of(peer) | {"samples": training.samples[peer], "batches": training.batches[peer]} for peer in workers
        ],
        "parameter_server": of(training.server),
        "loss": training.loss,
        "slices_set_aside": [
            {"slice": index, "providers": {str(failure.provider): failure.reason for failure in report.failures}}
            for index, report in sorted(training.set_aside.items())
        ],
    }
