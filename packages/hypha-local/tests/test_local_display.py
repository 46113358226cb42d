"""Progress display: reading events and showing them."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from hypha_local.display import Display, EventLog


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


def test_lost_and_late_workers_are_shown() -> None:
    out = io.StringIO()
    display = Display(Console(file=out), rounds=3)
    display.event({"event": "worker_lost", "worker": "12D3a", "reason": "its lease was not renewed"})
    display.event({"event": "worker_late", "worker": "12D3b", "round": 2, "seconds": 31.24})
    lost, late = out.getvalue().splitlines()
    assert lost.endswith("worker lost: 12D3a: its lease was not renewed")
    assert late.endswith("worker late: 12D3b: round 2 continued without it after 31.2 s")


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
