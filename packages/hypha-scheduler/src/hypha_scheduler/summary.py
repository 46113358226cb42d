"""Job summary: the content of a job's ``result.json``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypha_proto.ids import PeerId
from hypha_scheduler.metrics.traffic import TrafficCounts
from hypha_scheduler.strategies.diloco.operator import DilocoOperator


def summarize(
    operator: DilocoOperator,
    workers: Iterable[PeerId],
    before: Mapping[PeerId, TrafficCounts],
    after: Mapping[PeerId, TrafficCounts],
) -> dict[str, object]:
    """Return rounds, samples, loss and unused slices of a finished job, and the samples and traffic of each peer.

    Args:
        operator: operator of the job.
        workers: training workers of the job.
        before: traffic counts of peers at the start of the job.
        after: traffic counts now; 0 is written for peers that report none.
    """

    def of(peer: PeerId) -> dict[str, object]:
        carried = after.get(peer, TrafficCounts()) - before.get(peer, TrafficCounts())
        return {"peer": str(peer), "bytes_sent": carried.sent, "bytes_received": carried.received}

    return {
        "rounds": operator.rounds.closed,
        "samples": operator.samples.total(),
        "workers": [
            of(peer) | {"samples": operator.samples[peer], "batches": operator.batches[peer]} for peer in workers
        ],
        "parameter_server": of(operator.server),
        "loss": operator.loss,
        "slices_set_aside": [
            {"slice": index, "providers": {str(failure.provider): failure.reason for failure in report.failures}}
            for index, report in sorted(operator.set_aside.items())
        ],
    }
