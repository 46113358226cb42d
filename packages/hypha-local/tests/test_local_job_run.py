"""The running job of a demo: what is started, killed and shown when, and a whole demo of the task `text`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from rich.console import Console

from hypha_local.certificates import peer_names, write_certificates
from hypha_local.demo_tasks import TEXT
from hypha_local.display import Display, EventLog
from hypha_local.errors import ProcessFailedError
from hypha_local.job_run import REPLACED, JobRun, Victim
from hypha_local.network_layout import Folders, plan_nodes
from hypha_local.processes import LocalProcess, Processes

EVENTS: list[dict[str, Any]] = [
    {"event": "placement", "workers": [], "seconds": 0.3},
    *({"event": "round", "round": number} for number in range(1, 5)),
    {"event": "worker_lost", "worker": "12D3a", "reason": "its lease was not renewed"},
    {"event": "worker_joined", "worker": "12D3b", "round": 6, "member": 3, "reason": "it replaces 12D3a"},
    *({"event": "round", "round": number} for number in range(5, 11)),
]


class FakeScheduler:
    """Process that writes the next event of a job whenever somebody looks whether it runs, and ends after the last."""

    def __init__(self, events: Path) -> None:
        self._events, self._left = events, list(EVENTS)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if not self._left:
            self.returncode = 0
            return 0
        with self._events.open("a") as file:
            file.write(json.dumps(self._left.pop(0) | {"time": time.time()}) + "\n")
        return None


class FakeProcesses:
    """Notes what is started and killed."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.noted: list[str] = []
        (folders.runs / "job").mkdir()

    def start(self, name: str, command: Sequence[str], *, stdout: Path | None = None) -> LocalProcess:
        self.noted.append(f"start {name}")
        process = FakeScheduler(self.folders.runs / "job" / "metrics.jsonl")
        return LocalProcess(name, cast("subprocess.Popen[bytes]", process), self.folders.logs / f"{name}.log")

    async def watch(self, names: Sequence[str]) -> None:
        self.noted.append(f"watch {' '.join(sorted(names))}")
        await anyio.sleep_forever()

    async def kill(self, name: str) -> None:
        self.noted.append(f"kill {name}")

    def kill_descendant(self, name: str, word: str) -> bool:
        self.noted.append(f"kill {word} of {name}")
        return True


def run_job(tmp_path: Path, kill: Victim | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], JobRun, str]:
    """Run the events of `EVENTS`; return what was done to processes, the run, and what was shown."""
    monkeypatch.setattr("hypha_local.job_run._POLL", 0.001)
    folders = Folders(tmp_path / "run")
    folders.make()
    processes, out = FakeProcesses(folders), io.StringIO()
    nodes, display = plan_nodes(2, spare=kill in REPLACED), Display(Console(file=out, width=500), 10)
    again = partial(processes.start, "scheduler", [])
    job = JobRun(cast("Processes", processes), folders, nodes, "a.module", kill, again, display)
    anyio.run(job.run, backend="trio")
    return processes.noted, job, out.getvalue()


@pytest.mark.parametrize(
    ("victim", "killed", "watched"),
    [
        ("worker", "kill worker-1", "data gateway parameter-server worker-2"),
        ("executor", "kill a.module of worker-1", "data gateway parameter-server worker-1 worker-2"),
        ("parameter-server", "kill parameter-server", "data gateway worker-1 worker-2"),
    ],
)
def test_a_spare_is_started_with_the_job_and_replaces_what_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: Victim, killed: str, watched: str
) -> None:
    noted, job, shown = run_job(tmp_path, victim, monkeypatch)
    done = [each for each in noted if not each.startswith("watch ")]
    assert done == ["start scheduler", "start spare", killed]
    assert sorted(set(noted) - set(done)) == [f"watch {watched}", "watch spare"]
    lost, joined = job.changes
    assert lost.startswith("after ")
    assert lost.endswith("s worker lost: …12D3a: its lease was not renewed")
    assert joined.endswith("s worker joined: …12D3b, round 6: it replaces 12D3a")
    assert "killed after 40% of the rounds" in shown


def test_nothing_is_killed_and_no_spare_started_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, job, shown = run_job(tmp_path, None, monkeypatch)
    assert noted == ["start scheduler", "watch data gateway parameter-server worker-1 worker-2"]
    assert job.changes == []
    assert "worker lost: …12D3a" in shown


def test_a_data_node_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, _, _ = run_job(tmp_path, "data", monkeypatch)
    assert noted[2:] == ["kill data", "start data"]


def test_a_job_that_ends_before_the_kill_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypha_local.job_run.KILL_AFTER", 2.0)
    with pytest.raises(ProcessFailedError, match="--kill worker: the job had ended before"):
        run_job(tmp_path, "worker", monkeypatch)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_joint_training_reaches_a_lower_loss_than_each_worker_alone(tmp_path: Path) -> None:
    """Compare held-out loss in nats per byte with workers that train alone on their shards for as many steps."""
    program = str(Path(sys.executable).parent / "hypha-local")
    command = [program, "demo", "--task", TEXT.name, "--compare", "--dir", str(tmp_path / "run"), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["rounds"], summary["workers"], summary["parameters"]) == (TEXT.rounds, 3, 1_033_488)
    assert len(summary["alone_losses"]) == 3
    assert summary["test_loss"] < min(summary["alone_losses"]) - 0.05
    assert summary["test_loss"] < 2.2


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
