"""Job summary: the content of a job's ``result.json``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.diloco.operator import DilocoOperator


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Bytes of files that a peer sent and received for one job, as it states them at the job's end."""

    sent: int | None = None
    """None if the peer does not state it."""
    received: int | None = None


def summarize(
    operator: DilocoOperator,
    workers: Iterable[PeerId],
    traffic: Mapping[PeerId, TrafficCounts],
) -> dict[str, object]:
    """Return rounds, samples and loss of a finished job, and the samples and traffic of each peer.

    Args:
        operator: operator of the job.
        workers: training workers of the job.
        traffic: traffic of the job at peers; null is written for peers that do not state it, such as lost ones.
    """

    def of(peer: PeerId) -> dict[str, object]:
        carried = traffic.get(peer, TrafficCounts())
        return {"peer": str(peer), "bytes_sent": carried.sent, "bytes_received": carried.received}

    return {
        "rounds": operator.rounds.closed,
        "samples": operator.samples.total(),
        "workers": [
            of(peer) | {"samples": operator.samples[peer], "batches": operator.batches[peer]} for peer in workers
        ],
        "parameter_server": of(operator.server),
        "loss": operator.loss,
    }
