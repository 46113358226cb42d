"""TensorBoard export: converts a job's ``metrics.jsonl`` to event files.

The job and each worker get a directory, and therefore a curve, of their own. Needs the extra ``tensorboard``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import parse_json
from hypha_proto.ids import PeerId
from hypha_scheduler.jobs.record_file import whole_lines

JOB: Final = "job"
"""Directory of the metrics of the whole job."""
_EVENT_SCALARS: Final = ("loss", "samples", "samples_per_second", "seconds", "update_bytes")
_END_OF_TIME: Final = 1 << 40


class MetricsFileError(ValueError):
    """The run directory has no metrics to export."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One point of a curve."""

    curve: str
    """Directory: `JOB`, or ``worker-<peer id>``."""
    tag: str
    """Name of the metric."""
    step: int
    """Number of the round."""
    value: float
    time: float
    """Seconds since the Unix epoch."""


def export_metrics(run: Path, out: Path) -> int:
    """Write the event files of a run, replacing those of an earlier export of the same run.

    Args:
        run: the run directory; of a running job the metrics so far are exported.
        out: directory for TensorBoard's ``--logdir``; created if missing.

    Returns:
        The number of scalars.

    Raises:
        MetricsFileError: there is no ``metrics.jsonl``, it contains no metric, or a line is not a scheduler event.
        ImportError: the extra ``tensorboard`` is not installed.
    """
    scalars = _read_scalars(run / "metrics.jsonl")
    curves: dict[str, list[Scalar]] = {}
    for scalar in scalars:
        curves.setdefault(scalar.curve, []).append(scalar)
    first = min(scalar.time for scalar in scalars)
    for curve, points in curves.items():
        folder = out / curve
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"events.out.tfevents.{int(first):010d}.hypha", points, first)
    return len(scalars)


def _read_scalars(path: Path) -> list[Scalar]:
    if not path.is_file():
        raise MetricsFileError(f"{path} does not exist; name a run directory, such as runs/<job id>")
    scalars: list[Scalar] = []
    for number, line in enumerate(whole_lines(path.read_bytes()), 1):
        try:
            scalars += _scalars_of(parse_json(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise MetricsFileError(f"{path}, line {number}: not an event of a scheduler: {error!r}") from None
    if not scalars:
        raise MetricsFileError(f"{path}: no round is over yet, nothing to export")
    return scalars


def _scalars_of(event: dict[str, Any]) -> Iterable[Scalar]:
    """Return the points of an event; values that were not finite are null in the file and are skipped."""
    if event["event"] == "metric":
        values = {event["name"]: event["value"]}
        curve = f"worker-{PeerId.parse(event['worker'])}"
    elif event["event"] == "round":
        waits = {f"wait/{peer}": wait for peer, wait in event.get("waits", {}).items()}
        values = {name: event.get(name) for name in _EVENT_SCALARS} | waits
        curve = JOB
    else:
        return
    for tag, value in values.items():
        if value is not None:
            yield Scalar(curve, _tag(tag), _step(event["round"]), _number(value), _time(event["time"]))


def _tag(name: str) -> str:
    name.encode()  # a lone surrogate, which JSON can express, raises a ValueError
    return name


def _step(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"round {value!r:.40} is not a number from 0 to 2**63 - 1")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)  # type: ignore[arg-type]


def _time(value: object) -> float:
    seconds = _number(value)
    if not 0 <= seconds < _END_OF_TIME:
        raise ValueError(f"time {value!r:.40} is not in seconds since 1970")
    return seconds


def _write(path: Path, scalars: Sequence[Scalar], began: float) -> None:
    """Write an event file; a value beyond the range of single precision is infinity there."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    path.unlink(missing_ok=True)
    with closing(RecordWriter(str(path))) as file:
        file.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
        for scalar in scalars:
            summary = Summary(value=[Summary.Value(tag=scalar.tag, simple_value=scalar.value)])
            file.write(Event(wall_time=scalar.time, step=scalar.step, summary=summary).SerializeToString())
