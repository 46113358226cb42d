"""Events of a job: names of workers, and metrics posted to the status bridge."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from hypha_proto.ids import PeerId
from hypha_scheduler.jobs.events import JobEvents
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.strategies.base import PostMetric
from hypha_scheduler.strategies.diloco.events import measured_effects, round_closed_effects
from hypha_scheduler.strategies.diloco.rounds import Measured, RoundClosed

PEER = PeerId.from_public_key(bytes(32))


class _KeptPosts(StatusBridge):
    def __init__(self) -> None:
        super().__init__("nowhere:1")
        self.posts: list[tuple[str, int, str, float, str | None]] = []

    def put(self, worker: str, step: int, name: str, value: float, *, job_id: str | None = None) -> None:
        self.posts.append((worker, step, name, value, job_id))


def test_round_metrics_are_posted_per_worker(tmp_path: Path) -> None:
    other, job_id = PeerId.from_public_key(bytes([1] * 32)), uuid.uuid4()
    bridge = _KeptPosts()
    measured = Measured(PEER, 3, {"loss": 0.5, "samples_per_second": 80.0, "samples": 1.0})
    closed = RoundClosed(3, {PEER: 96, other: 40}, {PEER: 6, other: 5}, {PEER: 0.0, other: 1.0}, 4.0, 0.5)
    with JobEvents(job_id, tmp_path, bridge) as events:
        events.accepted({})
        for effect in (*measured_effects(measured), *round_closed_effects(closed, 1)):
            if isinstance(effect, PostMetric):
                events.post(effect)
    posted = {
        (worker, name): value for worker, number, name, value, job in bridge.posts if (number, job) == (3, str(job_id))
    }
    assert posted == {
        (str(PEER), "loss"): 0.5,
        (str(PEER), "samples_per_second"): 80.0,
        (str(PEER), "samples"): 96,
        (str(PEER), "batch_size"): 16.0,
        (str(PEER), "utilisation"): 1.0,
        (str(other), "samples"): 40,
        (str(other), "batch_size"): 8.0,
        (str(other), "utilisation"): 0.75,
    }
    assert len(bridge.posts) == len(posted)


def test_events_name_a_worker_as_its_certificate_does_also_when_it_has_gone(tmp_path: Path) -> None:
    connected = {PEER: "gpu-\x1b[3"}
    with JobEvents(uuid.uuid4(), tmp_path, certificate_names=lambda: connected) as events:
        events.emit("worker_joined", worker=str(PEER), reason="it has started")
        connected.clear()
        events.emit("worker_lost", worker=str(PEER), reason="its lease ended")
        events.emit("lease_draining", peer=str(PEER), reason="its owner drains it")
        events.emit("metric", worker=str(PEER), name="loss", value=1.0)
        events.emit("worker_joined", worker="12D3KooWOther", reason="it has started")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("worker_name") for line in lines] == ["gpu-?[3", "gpu-?[3", "gpu-?[3", None, None]
