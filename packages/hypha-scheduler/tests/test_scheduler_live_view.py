"""The live view of a job: its state, how it is drawn, the command on a terminal, and the events that are followed."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.process_ready import accept_interrupts

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import EmitEvent
from hypha_scheduler.strategies.diloco import events
from hypha_scheduler.submission.job_view import JobView, describe_event
from hypha_scheduler.submission.live_view import render, sparkline

PEER, OTHER = "12D3KooWworker", "12D3KooWanother"
HOSTILE = "[red]x[/red]\x1b[2J"


def placed(name: str = "worker-7") -> list[dict[str, Any]]:
    workers = [
        {"peer": PEER, "role": "train", "price": 36.0, "name": name},
        {"peer": OTHER, "role": "train", "price": 72.0},
    ]
    return [
        {"event": "accepted", "time": 0.0, "rounds": 10},
        {"event": "placement", "time": 100.0, "seconds": 1.0, "workers": workers},
    ]


def closed(number: int, loss: float | None) -> dict[str, Any]:
    return {"event": "round", "time": 100.0 + 10 * number, "round": number, "loss": loss, "counts": {PEER: 4}}


def measured(name: str, value: object) -> dict[str, Any]:
    return {"event": "metric", "time": 1.0, "worker": PEER, "name": name, "value": value}


def told(*events: dict[str, Any]) -> JobView:
    state = JobView()
    for event in events:
        state.add(event)
    return state


def drawn(state: JobView, now: float = 130.0, height: int = 24) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(state, now, height))
    return console.export_text()


def test_a_training_job_is_drawn_in_80_columns() -> None:
    metrics = [measured("samples", 128.0), measured("batches", 4.0), measured("samples_per_second", 64.0)]
    late = {"event": "worker_late", "time": 121.0, "worker": OTHER, "reason": "slow"}
    text = drawn(told(*placed(), *metrics, closed(1, 2.0), closed(2, 1.0), late), now=122.0)
    first, loss, header, *rows = text.splitlines()
    bar = "━" * 4 + "─" * 20
    assert first == f"running  {bar} 2/10 rounds  79 s left  cost 0.66  1 late"
    assert loss == "loss 1  █▁"
    assert header.split() == ["worker", "role", "price/h", "does", "batch", "/s"]
    assert [row.split() for row in rows] == [
        ["worker-7…worker", "train", "36", "works", "32", "64"],
        ["…nother", "train", "72", "late", "-", "-"],
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_inference_tasks_and_unknown_strategies_are_drawn() -> None:
    begun = {"event": "slices", "time": 100.0, "slices": 4, "rows": 40, "committed": 0}
    part = {"event": "part", "time": 110.0, "slice": 0, "worker": PEER, "rows": 10, "committed": 1, "slices": 4}
    inference = told(*placed(), begun, part)
    assert (inference.progress, inference.seconds_left) == ((10, 40, "rows"), 30.0)
    resumed = told(*placed(), begun | {"committed": 2}, part | {"committed": 3})
    assert (resumed.progress, resumed.seconds_left) == ((3, 4, "slices"), 10.0)
    started = {"event": "task_started", "time": 101.0, "task": "lost", "worker": PEER}
    tasks = told(*placed(), {"event": "task_ended", "time": 101.0, "worker": PEER, "outcome": "finished"}, started)
    assert (tasks.progress, tasks.rows[PEER].doing, tasks.rows[PEER].is_gone) == ((1, None, "tasks"), "lost", False)
    assert drawn(told(*placed(), {"event": "waltz", "time": 120.0, "steps": 3})).startswith("running  cost 0.9")
    assert drawn(told({"event": "round"}, {"event": "part"}, {"event": 3}, {})).startswith("accepted  cost 0")
    assert drawn(told({"event": "placement", "workers": None})).startswith("running  cost 0")


def test_pauses_and_workers_that_have_left_are_seen() -> None:
    paused = {"event": "paused", "time": 120.0, "reason": "too few"}
    lost = {"event": "worker_lost", "time": 120.0, "worker": PEER, "reason": "gone"}
    state = told(*placed(), lost, paused)
    lines = drawn(state).splitlines()
    assert lines[0].startswith("paused  ")
    assert lines[0].endswith("1 lost")
    assert [line.split()[0] for line in lines[2:]] == ["…nother", "worker-7…worker"]
    state.add({"event": "continued", "time": 121.0})
    assert drawn(state).startswith("running")
    accepted, *others = placed()
    sought = {"event": "shortage", "time": 1.0, "role": "train", "text": "0 of 1 suitable"}
    assert drawn(told(accepted, sought)).startswith("waiting")
    assert drawn(told(accepted, sought, *others)).startswith("running")


def test_texts_of_workers_are_no_markup_and_control_no_terminal() -> None:
    text = drawn(told(*placed(HOSTILE)))
    assert "\x1b" not in text
    assert "[red]x[/red]?[2J…worker" in text


def test_long_jobs_with_many_workers_stay_bounded() -> None:
    state = told(*placed())
    for number in range(1000):
        added = {"event": "lease_added", "time": 1.0, "peer": f"{number:09}", "role": "train", "price": 1.0}
        state.add(added)
        state.add(closed(number, float(number)))
        if number > 200:
            state.add({"event": "worker_lost", "time": 1.0, "worker": f"{number:09}"})
    assert len(state.losses) == 40
    lines = drawn(state).splitlines()
    assert len(lines) < 24
    assert lines[-1] == "and 985 more"


@pytest.mark.parametrize("value", [None, float("nan"), "x"])
def test_numbers_that_are_none_are_left_out(value: Any) -> None:
    state = told(*placed(), closed(1, value), measured("samples_per_second", value))
    assert not state.losses
    assert state.rows[PEER].samples_per_second is None
    assert sparkline([1.0, 1.0]) == "▁▁"


# ------------------------------------------------------------------------------------------------------- on a terminal


@pytest.fixture
def answering(runs: Path) -> Iterator[Callable[[], None]]:
    """Answer one `attach` on a socket; the job ends when the function that is yielded is called."""
    runs.mkdir()
    ended = threading.Event()
    events = [*placed(HOSTILE), closed(1, 2.0)]
    (runs / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    entry = {"job_id": str(uuid.UUID(int=7)), "state": "running", "directory": str(runs)}

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
            connection.sendall(json.dumps({"job": entry}).encode() + b"\n")
            ended.wait(60)
            with suppress(BrokenPipeError):  # Ctrl-C has ended the client
                connection.sendall(json.dumps({"result": "result.json"}).encode() + b"\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(60)
        listener.bind(str(runs / "s"))
        listener.listen()
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        yield ended.set
        ended.set()
        thread.join(60)


class Terminal:
    """`attach` on a pseudo-terminal."""

    def __init__(self, path: Path, *options: str) -> None:
        self.shown = ""
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        command = "import sys; from hypha_scheduler.cli import main; main(sys.argv[1:])"
        words = [sys.executable, "-c", command, "attach", "7", "--socket", str(path / "s"), *options]
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, env=environment, preexec_fn=accept_interrupts
        )
        os.close(slave)

    def read_until(self, text: str | None) -> None:
        """Read until a text was shown, or to the end."""
        while text is None or text not in self.shown:
            try:
                self.shown += os.read(self.master, 1 << 16).decode(errors="replace")
            except OSError:  # the other side is closed
                assert text is None, self.shown
                return

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self.master)


@pytest.fixture
def attach(runs: Path) -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def start(*options: str) -> Terminal:
        terminals.append(Terminal(runs, *options))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


@pytest.mark.timeout(180)
def test_attach_draws_a_view_that_ctrl_c_ends(answering: Any, attach: Callable[..., Terminal]) -> None:
    terminal = attach()
    for text in ("1/10 rounds", "round 1 of 10: loss 2", "[red]x[/red]?[2J"):
        terminal.read_until(text)
    assert "\x1b[2J" not in terminal.shown
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until(None)
    assert terminal.process.wait(60) == 130
    assert "goes on  follow it: hypha-scheduler attach " in terminal.shown.replace("\r\n", "")
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")  # the cursor is there again


@pytest.mark.timeout(180)
@pytest.mark.parametrize("options", [("--plain",), ("--format", "json")])
def test_other_forms_draw_nothing(options: tuple[str, ...], answering: Any, attach: Callable[..., Terminal]) -> None:
    terminal = attach(*options)
    terminal.read_until("round")
    answering()
    terminal.read_until(None)
    assert terminal.process.wait(60) == 0
    assert "\x1b[?25l" not in terminal.shown
    assert '{"result": "result.json"}' in terminal.shown


WORKER = PeerId.from_public_key(bytes(32))
SHOWN = f"…{str(WORKER)[-6:]}"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            events.member_event("worker_joined", "it replaces another", worker=str(WORKER), round=3, member=4),
            f"worker joined: {SHOWN}, round 3: it replaces another",
        ),
        (
            events.member_event("worker_left", "its worker ends, and its update counts", worker=str(WORKER), round=2),
            f"worker left: {SHOWN}, round 2: its worker ends, and its update counts",
        ),
        (
            events.suspected_event(WORKER, 2, 6.04),
            f"worker suspected: {SHOWN}, round 2: silent for 6.0 s, longer than a few of its batches take",
        ),
        (
            events.late_event(WORKER, 2, 31.24),
            f"worker late: {SHOWN}, round 2: the round continued without it after 31.2 s",
        ),
        (
            events.member_event(
                "worker_restarted",
                "executor failed, exit code 75: out of memory\n  | MemoryError",
                worker=str(WORKER),
                round=5,
                micro_batch=8,
            ),
            f"executor restarted: {SHOWN}, round 5: executor failed, exit code 75: out of memory",
        ),
        (
            events.replaced_event(WORKER, "aggregate", "its lease was not renewed"),
            f"worker replaced: {SHOWN}, aggregate: its lease was not renewed",
        ),
        (events.member_event("paused", "1 of at least 2 workers"), "paused: 1 of at least 2 workers"),
        (events.continued_event(12.5, "2 workers are there"), "continued: 2 workers are there"),
        (
            EmitEvent("shortage", {"role": "train", "text": "1 of 2 held, 1 more needed"}),
            "waiting for workers: train: 1 of 2 held, 1 more needed",
        ),
        (
            EmitEvent("lease_added", {"seconds": 0.6, "peer": str(WORKER), "name": "gpu-3", "role": "aggregate"}),
            f"worker found: gpu-3{SHOWN}, aggregate",
        ),
        (
            EmitEvent(
                "lease_draining", {"peer": str(WORKER), "worker_name": "gpu-3", "role": "train", "reason": "SIGTERM"}
            ),
            f"worker drains: gpu-3{SHOWN}, train: SIGTERM",
        ),
        (EmitEvent("metric", {"worker": "a", "reason": "b"}), None),
    ],
)
def test_changes_of_members_are_described_with_their_reason(event: EmitEvent, line: str | None) -> None:
    assert describe_event({"event": event.name, **event.fields}) == line
