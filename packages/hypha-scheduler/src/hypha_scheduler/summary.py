"""What a job came to, in numbers: the content of its ``result.json``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypha_proto.ids import PeerId
from hypha_scheduler.metrics.traffic import TrafficCounts
from hypha_scheduler.strategies.diloco.operator import DilocoOperator


def summarise(
    operator: DilocoOperator,
    workers: Iterable[PeerId],
    before: Mapping[PeerId, TrafficCounts],
    after: Mapping[PeerId, TrafficCounts],
) -> dict[str, object]:
    """Rounds, samples and loss of a job that is over, and what each of its peers did and carried.

    Args:
        operator: of the job.
        workers: its training workers.
        before: bytes that peers had carried when the job began.
        after: bytes that they have carried now; zero is written for those that do not say.
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
    }
