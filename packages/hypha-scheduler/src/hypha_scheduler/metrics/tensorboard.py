"""A job's ``metrics.jsonl`` as TensorBoard's event files; after the run, by the command ``export-metrics``.

An event file is a TFRecord file of protobuf messages, of which scalars need few fields, so it is written here without
TensorBoard: TensorBoard is needed only to look at it. One folder, and so one curve, for the job and for each worker.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from hypha_proto.ids import PeerId

JOB: Final = "job"
"""Folder of what concerns all workers."""
_ROUND_SCALARS: Final = ("loss", "samples", "samples_per_second", "seconds", "update_bytes")
_CASTAGNOLI: Final = 0x82F63B78
_MASK: Final = 0xA282EAD8
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
"""Protobuf wire types."""


class MetricsFileError(ValueError):
    """A run directory has no metrics that could be exported."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One point of one curve."""

    curve: str
    """Folder: `JOB`, or a worker's peer id."""
    tag: str
    step: int
    """The round."""
    value: float
    time: float
    """Seconds since the epoch."""


def export_metrics(run: Path, out: Path) -> int:
    """Write the event files of a run; files of an earlier export of the same run are replaced.

    Args:
        run: the run directory; a job that still runs is exported as far as it has come.
        out: the folder for TensorBoard's ``--logdir``, made when it is not there.

    Returns:
        The number of scalars.

    Raises:
        MetricsFileError: there is no ``metrics.jsonl``, or no metric in it, or a line that is none of a scheduler's.
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
    whole, _, _ = path.read_bytes().rpartition(b"\n")  # a line that is still being written waits
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            scalars += _scalars_of(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise MetricsFileError(f"{path}, line {number}: not an event of a scheduler: {error!r}") from None
    if not scalars:
        raise MetricsFileError(f"{path}: no round is over yet, nothing to export")
    return scalars


def _scalars_of(event: dict[str, Any]) -> Iterable[Scalar]:
    """The points that an event tells; non-finite ones stand as null there and are left out."""
    if event["event"] == "metric":
        values = {event["name"]: event["value"]}
        curve = f"worker-{PeerId.parse(event['worker'])}"
    elif event["event"] == "round":
        waits = {f"wait/{peer}": wait for peer, wait in event.get("waits", {}).items()}
        values = {name: event.get(name) for name in _ROUND_SCALARS} | waits
        curve = JOB
    else:
        return
    for tag, value in values.items():
        if value is not None:
            yield Scalar(curve, tag, int(event["round"]), float(value), float(event["time"]))


# ------------------------------------------------------------------------------------------------------ the file format


def event_file(scalars: Iterable[Scalar], began: float) -> bytes:
    """The bytes of an event file, its version first."""
    version = _field(1, _DOUBLE, struct.pack("<d", began)) + _text(3, b"brain.Event:2")
    return _record(version) + b"".join(_record(_event(scalar)) for scalar in scalars)


def _event(scalar: Scalar) -> bytes:
    value = _text(1, scalar.tag.encode()) + _field(2, _FLOAT, struct.pack("<f", _single(scalar.value)))
    summary = _text(1, value)
    step = _field(2, _VARINT, _varint(scalar.step))
    return _field(1, _DOUBLE, struct.pack("<d", scalar.time)) + step + _text(5, summary)


def _single(value: float) -> float:
    """As single precision holds it: what is beyond its range is infinite."""
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
    """A TFRecord: length and data, each with its masked CRC-32C."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum."""
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
