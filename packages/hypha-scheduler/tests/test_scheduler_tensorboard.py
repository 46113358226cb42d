"""TensorBoard export: which values become curves, and what is refused."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event

from hypha_proto.ids import PeerId
from hypha_scheduler.cli import main
from hypha_scheduler.jobs.events import EventFile
from hypha_scheduler.metrics.tensorboard import MetricsFileError, export_metrics

PEER = str(PeerId.from_public_key(bytes(32)))
OTHER = str(PeerId.from_public_key(bytes([1] * 32)))

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(["round", "metric", "accepted"]) | _PLAIN},
    optional={
        "round": st.integers(0, 9) | _PLAIN, "time": st.floats(0, 9) | _PLAIN, "worker": st.just(PEER) | _PLAIN,
        "name": st.just("loss") | _PLAIN, "value": _PLAIN, "loss": _PLAIN,
        "waits": st.dictionaries(st.text(max_size=5), _PLAIN, max_size=3) | _PLAIN,
    },
)  # fmt: skip


@given(st.lists(st.binary(max_size=50) | _EVENTS.map(lambda event: json.dumps(event).encode()), min_size=1, max_size=4))
@settings(deadline=None)
def test_any_metrics_file_is_exported_or_refused(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with contextlib.suppress(MetricsFileError):
        assert export_metrics(folder, folder / "out") > 0


def write_run(folder: Path) -> None:
    with EventFile(folder / "metrics.jsonl") as events:
        events.write("accepted", job_id="j", directory="d")
        for number in (1, 2):
            for peer in (PEER, OTHER):
                events.write("metric", worker=peer, round=number, name="loss", value=1 / number)
            waits = {PEER: 0.0, OTHER: 0.5}
            events.write("round", round=number, samples=96, loss=1 / number, seconds=2.0, waits=waits, counts={})
        events.write("metric", worker=PEER, round=3, name="loss", value=float("nan"))


def export(run: Path, out: Path) -> Result:
    return CliRunner().invoke(main, ["export-metrics", str(run), "--tensorboard", str(out)])


def curves(out: Path) -> dict[str, list[tuple[str, int, float]]]:
    """Return the values in the event files by directory: tag, step and value."""
    found = {}
    for path in out.rglob("events.out.tfevents.hypha"):
        events = [Event.FromString(record) for record in records(path.read_bytes())]
        assert events[0].file_version == "brain.Event:2"
        values = [(value.tag, event.step, value.simple_value) for event in events for value in event.summary.value]
        found[path.parent.relative_to(out).as_posix()] = values
    return found


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file: length, checksum, data, checksum."""
    while data:
        [length] = struct.unpack_from("<Q", data)
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_export_writes_one_curve_per_worker_also_of_a_running_job(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    write_run(run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "metric", "wor')
    result = export(run, out)
    assert result.exit_code == 0
    assert result.output.startswith("14 values in ")
    first = curves(out)
    assert set(first) == {"job", f"worker-{PEER}", f"worker-{OTHER}"}
    of_round = {("loss", 2, 0.5), ("samples", 2, 96.0), ("seconds", 2, 2.0), (f"wait/{OTHER}", 2, 0.5)}
    assert of_round <= set(first["job"])
    assert first[f"worker-{PEER}"] == [("loss", 1, 1.0), ("loss", 2, 0.5)]
    assert export(run, out).exit_code == 0
    assert curves(out) == first


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (None, "does not exist"),
        ({"event": "accepted", "time": 1}, "no round is over yet"),
        ({"event": "round", "time": 1, "loss": 1}, "line 1"),
        ({"event": "metric", "time": 1, "round": 1, "worker": "../..", "name": "loss", "value": 1}, "line 1"),
        ([], "line 1"),
        (json.loads("[" * 900 + "]" * 900), "nested more than 64 levels"),
        ({"event": "round", "time": 1, "round": 1, "waits": 1}, "line 1"),
        ({"event": "round", "time": 1, "round": "1", "loss": 1}, "line 1"),
        ({"event": "round", "time": 1, "round": 1 << 63, "loss": 1}, "line 1"),
        ({"event": "round", "time": 1, "round": 1, "loss": 10**400}, "line 1"),
        ({"event": "metric", "time": 1, "round": 1, "worker": PEER, "name": "\ud800", "value": 1}, "line 1"),
    ],
)
def test_export_errors_are_reported(tmp_path: Path, line: Any, why: str) -> None:
    if line is not None:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    result = export(tmp_path, tmp_path / "out")
    assert result.exit_code == 2
    assert why in result.output
    assert not (tmp_path / "out").exists()
