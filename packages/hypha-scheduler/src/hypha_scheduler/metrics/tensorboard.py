"""TensorBoard export: converts a job's ``metrics.jsonl`` to event files.

The job and each worker get a directory, and therefore a curve, of their own. Needs the extra ``tensorboard``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import parse_json
from hypha_proto.ids import PeerId
from hypha_proto.record_file import EVENTS, whole_lines

JOB: Final = "job"
"""Directory of the metrics of the whole job."""
_EVENT_SCALARS: Final = ("loss", "samples", "samples_per_second", "seconds", "update_bytes")


class MetricsFileError(ValueError):
    """The run directory has no metrics to export."""


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
    from tensorboardX.record_writer import RecordWriter

    count = 0
    for curve, scalars in _read_scalars(run / EVENTS).items():
        folder = out / curve
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "events.out.tfevents.hypha"
        path.unlink(missing_ok=True)
        with closing(RecordWriter(str(path))) as file:
            for event in (_event(scalars[0].wall_time, file_version="brain.Event:2"), *scalars):
                file.write(event.SerializeToString())
        count += len(scalars)
    return count


def _read_scalars(path: Path) -> dict[str, list[Any]]:
    """Return TensorBoard's events by their directory: `JOB`, or ``worker-<peer id>``."""
    if not path.is_file():
        raise MetricsFileError(f"{path} does not exist; name a run directory, such as runs/<job id>")
    curves: dict[str, list[Any]] = {}
    for number, line in enumerate(whole_lines(path.read_bytes()), 1):
        try:
            for curve, scalar in _scalars_of(parse_json(line)):
                curves.setdefault(curve, []).append(scalar)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise MetricsFileError(f"{path}, line {number}: not an event of a scheduler: {error!r}") from None
    if not curves:
        raise MetricsFileError(f"{path}: no round is over yet, nothing to export")
    return curves


def _scalars_of(event: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return the points of an event; values that were not finite are null in the file and are skipped."""
    from tensorboardX.proto.summary_pb2 import Summary

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
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            yield curve, _event(event["time"], step=event["round"], summary=summary)


def _event(wall_time: float, **fields: Any) -> Any:
    from tensorboardX.proto.event_pb2 import Event

    return Event(wall_time=wall_time, **fields)
