"""A hub token must not leak anywhere while a job with a private repository runs, nor afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import local_network
from support.fake_hf_hub import Hub, hub_server
from support.local_network import LocalNetwork
from support.otlp_collector import Collector, http_collector

import hypha_local.processes

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(300)]

TOKEN = "hf_LookForMe0123456789abcdef"
WRONG = "hf_WrongOne0123456789abcdef"
MODEL = 'repository = "org/model"\nrevision = "v2"\ntoken = "{token}"\nserve = false'


class Watch:
    """Polls arguments and environment of every descendant process."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.executors: set[int] = set()
        self._over = threading.Event()

    def look(self) -> None:
        while not self._over.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                try:
                    words, variables = process.cmdline(), process.environ()
                except psutil.Error:
                    continue
                if "hypha.accelerate_executor.training" in words:
                    self.executors.add(process.pid)
                shown = [*words, *variables.values()]
                self.found |= {f"{process.pid} {words[:4]}" for text in shown if "LookForMe" in text or WRONG in text}

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self.look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(5)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with http_collector() as collector:
        yield collector


@contextmanager
def private_network(
    root: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LocalNetwork, Hub]]:
    """Run a network whose model exists only in a private repository, with all telemetry exported."""
    inherited = hypha_local.processes.child_environment
    with hub_server({}, TOKEN) as hub:
        more = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRIC_EXPORT_INTERVAL": "1000"}
        more |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(root / "hf")}

        def environment(*args: Any) -> dict[str, str]:
            dropped = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
            return {key: text for key, text in inherited(*args).items() if key not in dropped} | more

        monkeypatch.setattr(hypha_local.processes, "child_environment", environment)
        with local_network.local_network(root, workers=1) as network:
            start = network.folders.start_model
            hub.files |= {path.name: path.read_bytes() for path in start.iterdir() if path.is_file()}
            yield network, hub


def files_with(root: Path, text: str) -> list[str]:
    """Return files that contain a text, except the configuration in which the user wrote it."""
    found = (path for path in root.rglob("*") if path.is_file() and path.parent.name != "config")
    return [str(path.relative_to(root)) for path in found if text.encode() in path.read_bytes()]


def test_the_token_does_not_leak(collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, root = Watch(), tmp_path / "run"
    with private_network(root, collector, monkeypatch) as (network, hub), watch.watching():
        job = network.job(rounds=3, model=MODEL.format(token=TOKEN))
        job.wait_for_round(1)
        while_it_runs = files_with(root, TOKEN)
        assert job.wait(120) == 0, job.log
        workers = [path for _, path, _, _ in hub.seen if "/resolve/" in path]
    assert len(workers) >= 4, "the worker and the scheduler fetched both files"
    assert watch.executors, "no executor was seen"
    assert while_it_runs == []
    assert files_with(root, TOKEN) == []
    assert watch.found == set()
    assert collector.spans
    assert collector.metrics
    assert collector.logs
    assert TOKEN.encode() not in collector.bytes
