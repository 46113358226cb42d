"""Summary of a demo run: measured values, and the traffic that exchanging gradients at every step would have caused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hypha_proto.model_listing import weights_of
from hypha_proto.safetensors_io import TensorFile
from hypha_proto.training_reports import COMPUTE_SECONDS, DATA_WAIT_SECONDS, REPORT_WAIT_SECONDS, SYNC_SECONDS

_NEXT_LINE: Final = "\n" + 19 * " "
"""Begins a further line of a value."""
_TIMES: Final = {
    COMPUTE_SECONDS: "computing",
    DATA_WAIT_SECONDS: "waiting for data",
    REPORT_WAIT_SECONDS: "waiting for the network",
    SYNC_SECONDS: "synchronising",
}
"""Where the time of a worker goes, and how it is shown."""
_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of a demo run. Byte counts are of files that the workers moved for the job, without headers and TLS."""

    accuracy: float
    """Fraction of test images classified correctly or, for text, of bytes predicted correctly."""
    test_loss: float
    """Mean cross entropy on held-out samples, in nats per image or, for text, per byte."""
    rounds: int
    workers: int
    samples: int
    """Training samples of all workers and rounds."""
    wall_seconds: float
    """Time from the start of the command until the trained model was evaluated."""
    placement_seconds: float
    """Time from the published request until all leases were held."""
    training_seconds: float
    """Duration of the job as measured by the scheduler, allocation included."""
    bytes_sent_per_worker: int
    """Mean over the training workers that state it; 0 if none does."""
    bytes_received_per_worker: int
    """Mean over the training workers."""
    per_step_bytes_per_worker: int
    """Payload that a worker would have sent with float32 gradients after each step."""
    traffic_ratio: float
    """`per_step_bytes_per_worker` divided by `bytes_sent_per_worker`."""
    parameters: int
    seed: int
    model_dir: str
    task: str = "digits"
    alone_losses: tuple[float, ...] = ()
    """With `--compare`, the test loss of each worker trained alone on its shard with the same number of steps."""
    killed: str | None = None
    """What was killed during the job."""
    changes: tuple[str, ...] = ()
    """Changes of the job's members since then, each with the seconds."""
    audit: str = ""
    """What ``hypha-scheduler audit`` says."""
    worker_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Where the time of each worker that states it has gone, by `hypha_proto.training_reports.ROUND_SECONDS`."""

    def as_json(self) -> str:
        """Format the summary as a JSON object."""
        return json.dumps(asdict(self))

    def as_text(self) -> str:
        """Format the summary for people."""
        return "\n".join(
            (
                *self._quality(),
                f"rounds             {self.rounds}, {self.samples:,} samples by {self.workers} workers",
                *self._times(),
                *self._shares(),
                f"sent per worker    {self.bytes_sent_per_worker / 1e6:.2f} MB of updates; gradients at every step: "
                f"{self.per_step_bytes_per_worker / 1e6:.2f} MB ({self.traffic_ratio:.1f} times as much)",
                f"received           {self.bytes_received_per_worker / 1e6:.2f} MB per worker",
                *([f"killed             {self.killed}, when 40 % of the rounds were done"] if self.killed else []),
                *([f"then               {_NEXT_LINE.join(self.changes)}"] if self.changes else []),
                f"audit              {self.audit}".replace("\n", _NEXT_LINE),
                f"model              {self.model_dir}",
            )
        )

    def _times(self) -> list[str]:
        if self.killed == "scheduler":  # it counts from its second start, which needs no placement
            after = f"{self.training_seconds:.1f} s of it after the scheduler was started again"
            return [f"time               {self.wall_seconds:.1f} s, {after}"]
        return [
            f"time               {self.wall_seconds:.1f} s, of which training {self.training_seconds:.1f} s",
            f"placement          {self.placement_seconds:.2f} s from request to leases",
        ]

    def _shares(self) -> list[str]:
        if not self.worker_seconds:
            return []
        return [f"{name:<18} {_describe_shares(seconds)}" for name, seconds in self.worker_seconds.items()]

    def _quality(self) -> list[str]:
        size = f"({self.parameters:,} parameters, seed {self.seed})"
        lines = [f"test accuracy      {self.accuracy:.4f}  {size}"]
        if self.task == "text":
            lines = [f"validation loss    {self.test_loss:.4f} nats/byte  {size}"]
        if self.alone_losses:
            alone = ", ".join(f"{loss:.4f}" for loss in self.alone_losses)
            lines.append(
                f"each worker alone  {alone} after as many steps on its own shard; together {self.test_loss:.4f}"
            )
        return lines


def _describe_shares(seconds: Mapping[str, float]) -> str:
    """Return for which shares of its time a worker has done what."""
    total = sum(seconds.values()) or 1.0
    return ", ".join(f"{seconds.get(name, 0.0) / total:.1%} {text}" for name, text in _TIMES.items())


def count_parameters(model_dir: Path) -> int:
    """Return the number of parameters in a model directory, without running statistics."""
    total = 0
    for path in weights_of(model_dir):
        with TensorFile(path) as tensors:
            total += sum(
                info.elements for name, info in tensors.tensors.items() if name.rpartition(".")[2] not in _STATISTICS
            )
    return total


def _mean(counts: Sequence[int | None]) -> int:
    """Return the mean of the known counts, 0 if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) // len(known) if known else 0


def _seconds_by_name(
    trainers: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, float]]]:
    for worker in trainers:
        if seconds := worker.get("seconds"):
            yield names.get(worker["peer"], worker["peer"]), seconds


def summarize(
    result: dict[str, Any],
    evaluation: dict[str, Any],
    *,
    seed: int,
    wall_seconds: float,
    model_dir: Path,
    names: Mapping[str, str] | None = None,
) -> Summary:
    """Build the summary from the scheduler's ``result.json`` and the executor's evaluation.

    `names` has the names of peers by their ids.
    """
    trainers = result["workers"]
    parameters = count_parameters(model_dir)
    sent = _mean([worker["bytes_sent"] for worker in trainers])
    steps = sum(worker["batches"] for worker in trainers) / len(trainers)
    per_step = int(steps * parameters * 4)
    return Summary(
        accuracy=evaluation["accuracy"],
        test_loss=evaluation["loss"],
        rounds=result["rounds"],
        workers=len(trainers),
        samples=result["samples"],
        wall_seconds=round(wall_seconds, 2),
        placement_seconds=round(result["placement_seconds"], 3),
        training_seconds=round(result["wall_seconds"], 2),
        bytes_sent_per_worker=sent,
        bytes_received_per_worker=_mean([worker["bytes_received"] for worker in trainers]),
        per_step_bytes_per_worker=per_step,
        traffic_ratio=round(per_step / sent, 2) if sent else 0.0,
        parameters=parameters,
        seed=seed,
        model_dir=str(model_dir),
        worker_seconds=dict(sorted(_seconds_by_name(trainers, names or {}))),
    )
