"""Following a submitted job: which events are shown to its owner, and how."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hypha_proto.ids import PeerId
from hypha_scheduler.jobs.events import EventFile
from hypha_scheduler.jobs.record_file import EVENTS
from hypha_scheduler.strategies.base import EmitEvent
from hypha_scheduler.strategies.diloco import events
from hypha_scheduler.strategies.diloco.rounds import Late, Left
from hypha_scheduler.submission.event_follower import describe_event, follow_events

PEER = PeerId.from_public_key(bytes(32))
SHOWN = f"…{str(PEER)[-6:]}"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            events.joined_event(PEER, 3, 4, "it replaces another"),
            f"worker joined: {SHOWN}, round 3: it replaces another",
        ),
        (
            events.left_event(Left(PEER, 2)),
            f"worker left: {SHOWN}, round 2: its worker ends, and its update counts",
        ),
        (
            events.suspected_event(PEER, 2, 6.04),
            f"worker suspected: {SHOWN}, round 2: silent for 6.0 s, longer than a few of its batches take",
        ),
        (
            events.late_event(Late(PEER, 2, 31.24)),
            f"worker late: {SHOWN}, round 2: the round continued without it after 31.2 s",
        ),
        (
            events.restarted_event(PEER, 5, 8, "executor failed, exit code 75: out of memory\n  | MemoryError"),
            f"executor restarted: {SHOWN}, round 5: executor failed, exit code 75: out of memory",
        ),
        (
            events.replaced_event(PEER, "aggregate", "its lease was not renewed"),
            f"worker replaced: {SHOWN}, aggregate: its lease was not renewed",
        ),
        (events.paused_event("1 of at least 2 workers"), "paused: 1 of at least 2 workers"),
        (events.continued_event(12.5, "2 workers are there"), "continued: 2 workers are there"),
        (
            EmitEvent("shortage", {"role": "train", "text": "1 of 2 held, 1 more needed"}),
            "waiting for workers: train: 1 of 2 held, 1 more needed",
        ),
        (
            EmitEvent("lease_added", {"seconds": 0.6, "peer": str(PEER), "name": "gpu-3", "role": "aggregate"}),
            f"worker found: gpu-3{SHOWN}, aggregate",
        ),
        (
            EmitEvent(
                "lease_draining", {"peer": str(PEER), "worker_name": "gpu-3", "role": "train", "reason": "SIGTERM"}
            ),
            f"worker drains: gpu-3{SHOWN}, train: SIGTERM",
        ),
        (EmitEvent("metric", {"worker": "a", "reason": "b"}), None),
    ],
)
def test_changes_of_members_are_described_with_their_reason(event: EmitEvent, line: str | None) -> None:
    assert describe_event({"event": event.name, **event.fields}) == line


def test_only_what_is_new_is_said_and_nothing_is_lost_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    with EventFile(tmp_path / EVENTS) as file:
        write(file, events.paused_event("before"))
        position = (tmp_path / EVENTS).stat().st_size
        write(file, events.paused_event("since the job was accepted"))
        with follow_events(tmp_path / EVENTS, lambda event: said.append(str(describe_event(event))), position):
            write(file, events.paused_event("the disk is full"))
            write(file, events.continued_event(2.0, "there is room"))
    assert said == ["paused: since the job was accepted", "paused: the disk is full", "continued: there is room"]


def test_a_file_that_appears_later_is_followed_while_the_job_runs(tmp_path: Path) -> None:
    heard = threading.Event()
    with follow_events(tmp_path / EVENTS, lambda _line: heard.set()):
        with EventFile(tmp_path / EVENTS) as file:
            write(file, events.paused_event("no parameter server"))
        assert heard.wait(30)


def write(file: EventFile, event: EmitEvent) -> None:
    file.write(event.name, **event.fields)
