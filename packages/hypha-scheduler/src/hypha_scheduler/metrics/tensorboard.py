"""TensorBoard export: converts a job's ``metrics.jsonl`` to event files. Called by the command ``export-metrics``.

An event file is a TFRecord file (https://www.tensorflow.org/tutorials/load_data/tfrecord) of protobuf messages.
Scalars need few fields, so they are encoded here and TensorBoard need not be installed. The job and each worker get a
directory, and therefore a curve, of their own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import parse_json, split_json_lines
from hypha_proto.ids import PeerId

JOB: Final = "job"
"""Directory of the metrics of the whole job."""
_EVENT_SCALARS: Final = ("loss", "samples", "samples_per_second", "seconds", "update_bytes")
_CASTAGNOLI: Final = 0x82F63B78
_MASK: Final = 0xA282EAD8
_END_OF_TIME: Final = 1 << 40
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
"""Protobuf wire types."""


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
    """
    scalars = _read_scalars(run / "metrics.jsonl")
    curves: dict[str, list[Scalar]] = {}
    for scalar in scalars:
        curves.setdefault(scalar.curve, []).append(scalar)
    first = min(scalar.time for scalar in scalars)
    for curve, points in curves.items():
        folder = out / curve
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"events.out.tfevents.{int(first):010d}.hypha").write_bytes(event_file(points, first))
    return len(scalars)


def _read_scalars(path: Path) -> list[Scalar]:
    if not path.is_file():
        raise MetricsFileError(f"{path} does not exist; name a run directory, such as runs/<job id>")
    scalars: list[Scalar] = []
    whole, _, _ = path.read_bytes().rpartition(b"\n")  # without a last line that is still being written
    for number, line in enumerate(split_json_lines(whole), 1):
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


# ------------------------------------------------------------------------------------------------------ the file format


def event_file(scalars: Iterable[Scalar], began: float) -> bytes:
    """Encode an event file: a version record, then one record per scalar."""
    version = _field(1, _DOUBLE, struct.pack("<d", began)) + _text(3, b"brain.Event:2")
    return _record(version) + b"".join(_record(_event(scalar)) for scalar in scalars)


def _event(scalar: Scalar) -> bytes:
    value = _text(1, scalar.tag.encode()) + _field(2, _FLOAT, struct.pack("<f", _single(scalar.value)))
    summary = _text(1, value)
    step = _field(2, _VARINT, _varint(scalar.step))
    return _field(1, _DOUBLE, struct.pack("<d", scalar.time)) + step + _text(5, summary)


def _single(value: float) -> float:
    """Return `value`, or infinity if it is outside the range of single precision."""
    return math.copysign(math.inf, value) if abs(value) > 3.4028235e38 else value


def _field(number: int, wire_type: int, payload: bytes) -> bytes:
    return _varint(number << 3 | wire_type) + payload


def _text(number: int, payload: bytes) -> bytes:
    return _field(number, _BYTES, _varint(len(payload)) + payload)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _record(data: bytes) -> bytes:
    """Encode a TFRecord: length and data, each followed by its masked CRC-32C."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) checksum of `data`."""
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return tuple(table)
