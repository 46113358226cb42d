"""Progress display: reading events and showing them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hypha_local.certificates import peer_names, write_certificates
from hypha_local.display import Display, EventLog
from hypha_local.network_layout import Folders, plan_nodes


def test_events_are_read_once_and_complete(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    assert log.read() == []
    (tmp_path / "job").mkdir()
    path = tmp_path / "job" / "metrics.jsonl"
    path.write_text('{"event": "placement"}\n{"event": "ro')
    assert log.read() == [{"event": "placement"}]
    with path.open("a") as file:
        file.write('und"}\n')
    assert log.read() == [{"event": "round"}]
    assert log.read() == []


def test_text_is_neither_wrapped_nor_parsed_as_markup() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=40), rounds=3)
    display.event({"event": "failed", "error": "no /a[/b] in [cb38] " + "long " * 20 + "end"})
    display.step("pip install 'hypha-local[plot]'")
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("job failed: no /a[/b] in [cb38] " + "long " * 20 + "end")
    assert lines[1].endswith("pip install 'hypha-local[plot]'")


CHANGES = {
    "worker lost: …12D3a: its lease was not renewed": {
        "event": "worker_lost",
        "worker": "12D3a",
        "reason": "its lease was not renewed",
    },
    "worker late: …12D3b, round 2: the round continued without it": {
        "event": "worker_late",
        "worker": "12D3b",
        "round": 2,
        "seconds": 31.24,
        "reason": "the round continued without it",
    },
    "worker joined: …12D3c, round 3: it replaces 12D3a": {
        "event": "worker_joined",
        "worker": "12D3c",
        "round": 3,
        "member": 4,
        "reason": "it replaces 12D3a",
    },
    "executor restarted: …12D3b, round 4: executor failed, exit code 75": {
        "event": "worker_restarted",
        "worker": "12D3b",
        "round": 4,
        "micro_batch": 8,
        "reason": "executor failed, exit code 75\n  | MemoryError",
    },
    "worker replaced: …12D3d, aggregate: its lease was not renewed": {
        "event": "worker_replaced",
        "worker": "12D3d",
        "role": "aggregate",
        "reason": "its lease was not renewed",
    },
    "worker found: …12D3e, aggregate": {"event": "lease_added", "peer": "12D3e", "role": "aggregate", "seconds": 0.6},
    "paused: 1 of at least 2 workers": {"event": "paused", "reason": "1 of at least 2 workers"},
    "continued: 2 workers are there": {"event": "continued", "seconds": 12.5, "reason": "2 workers are there"},
    "waiting for workers: train: 1 of 2 held": {"event": "shortage", "role": "train", "text": "1 of 2 held"},
}


@pytest.mark.parametrize(("line", "event"), CHANGES.items())
def test_changes_of_the_members_are_shown_with_their_reasons(line: str, event: dict[str, Any]) -> None:
    out = io.StringIO()
    Display(Console(file=out), rounds=3).event(event)
    [shown] = out.getvalue().splitlines()
    assert shown.endswith(line)


def test_peers_are_shown_by_their_names(tmp_path: Path) -> None:
    nodes = plan_nodes(1)
    folders = Folders(tmp_path / "run")
    folders.make()
    write_certificates(folders.certificates, nodes)
    names = peer_names(folders.certificates, nodes)
    assert sorted(names.values()) == ["data", "gateway", "parameter-server", "scheduler", "worker-1"]
    [worker] = [peer for peer, name in names.items() if name == "worker-1"]
    out = io.StringIO()
    Display(Console(file=out), rounds=3, names=names).event(
        {"event": "worker_lost", "worker": worker, "worker_name": "worker-1", "reason": f"{worker} is gone"}
    )
    shown = f"worker-1…{worker[-6:]}"
    assert out.getvalue().strip().endswith(f"worker lost: {shown}: {shown} is gone")


def test_a_slice_that_is_set_aside_is_shown_with_the_reason() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=40), rounds=3)
    display.event({"event": "slice_set_aside", "slice": 7, "providers": {"12D3a": "the digest is wrong"}})
    expected = "slice set aside: the job continues without slice 7: data node 12D3a: the digest is wrong"
    assert out.getvalue().strip().endswith(expected)


def test_round_without_measurable_duration_is_shown() -> None:
    shown = io.StringIO()
    Display(Console(file=shown), rounds=1).event(
        {"event": "round", "round": 1, "loss": 0.5, "samples_per_second": None}
    )
    assert "round 1/1: loss 0.5000  0 samples/s" in shown.getvalue()
