"""A whole job behind the bridge of a Rust worker, as far as executors see it.

Such a bridge reads the reference and nothing else of a fetch, and answers with ``path`` and ``size`` only: files of
the model at ``artifacts/<name>``, every slice at the same path, named by its position in the answer. It answers a send
before it has read the file. Its events are lists, and an outer update is named after its sender in every round.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hypha.accelerate_executor import training

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_torch_thread")]


@dataclass
class RustBridge:
    """The answers of a Rust worker's bridge, in place of those of a fake worker of ours."""

    worker: Any
    slices: int = 0
    waiting: dict[str, Any] | None = None
    """The send that was answered, and whose file was not read yet."""
    listening: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.worker.answers |= {
            "/resources/fetch": self.fetch,
            "/resources/send": self.send,
            "/status/send": self.status,
        }

    def fetch(self, body: Any) -> tuple[int, Any]:
        folder: Path = self.worker.work_dir / "artifacts"
        if body["type"] == "scheduler":
            source = self.worker.slices[self.slices % len(self.worker.slices)]
            self.slices += 1
            return 200, [self.place(source, folder / "0")]
        return 200, [self.place(path, folder / path.name) for path in sorted(self.worker.model_dir.iterdir())]

    def place(self, source: Path, target: Path) -> dict[str, Any]:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())  # into the file that is there, if it still is
        name = target.relative_to(self.worker.work_dir).as_posix()
        return {"path": name, "size": target.stat().st_size}

    def send(self, body: Any) -> tuple[int, Any]:
        self.waiting = {"path": body["path"], "round": len(self.worker.updates) + 1}
        return 200, None

    def status(self, body: Any) -> tuple[int, Any]:
        if isinstance(body, dict) and "metrics" in body:
            self.send_in_background()
        answer: tuple[int, Any] = self.worker.status(body)
        return answer

    def send_in_background(self) -> None:
        """Read the file, and push the outer update that the parameter server makes of it."""
        assert self.waiting is not None
        number, worker = self.waiting["round"], self.worker
        kept, outer = (worker.work_dir.parent / f"{kind}-{number}.safetensors" for kind in ("kept", "outer"))
        shutil.copy(worker.work_dir / self.waiting["path"], kept)
        worker.updates.append(kept)
        worker.outer.step(kept, outer)
        sender = json.loads(worker.job())["executor"]["config"]["results"]["peers"][0]
        arrived = self.place(outer, worker.work_dir / "incoming" / sender)
        worker.events.put([{**arrived, "from_peer": sender}])


def test_a_job_completes_and_trains_as_behind_our_own_bridge(make_worker: Callable[..., Any]) -> None:
    ours, theirs = make_worker(rounds=3, batches=8), make_worker(rounds=3, batches=8)
    bridge = RustBridge(theirs)
    for worker in (ours, theirs):
        assert training.main([*worker.arguments(), "--timeout", "20"]) == 0
    assert bridge.slices >= 4, "several slices took the same name"
    assert theirs.done_rounds == 3
    assert len(theirs.updates) == 3
    for mine, other in zip(ours.updates, theirs.updates, strict=True):
        assert mine.read_bytes() == other.read_bytes()
    assert not list(theirs.work_dir.glob("update-*"))
    assert not list((theirs.work_dir / "incoming").iterdir())


def test_the_files_of_a_preprocessor_are_kept_apart_from_the_models(make_worker: Callable[..., Any]) -> None:
    """Both lie in one folder there, and both have a ``config.json``."""
    from hypha.accelerate_executor.bridge.client import Bridge
    from hypha_proto.job_spec import UriReference

    worker = make_worker()
    RustBridge(worker)
    with Bridge(worker.socket, worker.work_dir, 10.0) as bridge:
        for folder in ("model", "preprocessor"):
            fetched = [file.path for file in bridge.fetch(UriReference(value="https://x/y"), folder)]
            assert {path.parent for path in fetched} == {worker.work_dir / folder}
    for folder in ("model", "preprocessor"):
        assert (worker.work_dir / folder / "config.json").is_file()
