"""The demo's rooms by themselves: run directories, configuration, child processes, events, the summary."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import anyio
import numpy as np
import psutil
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from hypha_local.datasets.digits import write_digits
from hypha_local.display import Display, EventLog
from hypha_local.errors import ProcessFailedError, RunDirectoryError
from hypha_local.network_layout import Folders, Training, plan_nodes, write_configuration
from hypha_local.processes import child_environment, local_processes
from hypha_local.summary import count_parameters, summarise


def test_only_run_directories_are_replaced(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    (folders.logs / "old.log").write_text("old")
    folders.make()
    assert not (folders.logs / "old.log").exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("42")
    with pytest.raises(RunDirectoryError, match="precious"):
        Folders(precious).make()
    assert (precious / "thesis.tex").read_text() == "42"


def test_tidying_keeps_the_results(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    folders.model.mkdir()
    folders.metrics.write_text("{}\n")
    folders.tidy()
    assert sorted(path.name for path in folders.root.iterdir()) == [".hypha-local", "logs", "metrics.jsonl", "model"]


def test_every_node_gets_a_configuration_of_its_own(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    nodes = plan_nodes(2)
    write_configuration(folders, nodes, Training(workers=2, rounds=7, seed=5), sys.executable)
    files = {path.stem: tomllib.loads(path.read_text()) for path in folders.configuration.iterdir()}
    assert set(files) == {"gateway", "data", "worker-1", "worker-2", "parameter-server", "scheduler"}
    assert len({tuple(file["listen_addresses"]) for file in files.values()}) == len(files)
    assert files["worker-1"]["gateway_addresses"] == files["gateway"]["listen_addresses"]
    job = files["scheduler"]["scheduler"]["job"]
    assert (job["seed"], job["rounds"]["update_rounds"], job["resources"]["num_workers"]) == (5, 7, 2)
    assert (job["dataset"], job["rounds"]["evaluate_every"]) == ({"dataset": "digits"}, 0)


def test_a_python_in_a_folder_of_any_name_can_be_configured(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "demo")
    folders.make()
    python = "/home/\u017elu\u0165 \U0001f40d/bin/python"
    write_configuration(folders, plan_nodes(1), Training(workers=1), python)
    text = (folders.configuration / "worker-1.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["executors"][0]["cmd"] == python


def test_a_demo_that_evaluates_announces_what_no_worker_trains_on(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    write_configuration(folders, plan_nodes(1), Training(workers=1, evaluate_every=2), sys.executable)
    data, scheduler = (
        tomllib.loads((folders.configuration / f"{name}.toml").read_text()) for name in ("data", "scheduler")
    )
    assert [each["name"] for each in data["datasets"]] == ["digits", "held-out"]
    job = scheduler["scheduler"]["job"]
    assert job["dataset"] == {"dataset": "digits", "evaluation": "held-out"}
    assert job["rounds"]["evaluate_every"] == 2


def test_the_split_is_stratified_and_disjoint(tmp_path: Path) -> None:
    sizes = write_digits(tmp_path / "train", tmp_path / "test")
    train, test = load_file(tmp_path / "train"), load_file(tmp_path / "test")
    assert sizes == (1437, 360) == (len(train["labels"]), len(test["labels"]))
    assert train["pixel_values"].shape[1:] == (1, 8, 8)
    shares = [np.bincount(part["labels"], minlength=10) / len(part["labels"]) for part in (train, test)]
    assert np.abs(shares[0] - shares[1]).max() < 0.005


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_no_child_outlives_its_context(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    pids = []

    async def main() -> None:
        async with local_processes(tmp_path) as processes:
            children = [
                processes.start("polite", [sys.executable, "-c", "import time; time.sleep(60)"]),
                processes.start("stubborn", [sys.executable, "-c", stubborn]),
            ]
            pids.extend(child.process.pid for child in children)
            while "up" not in children[1].last_lines():
                await anyio.sleep(0.01)
            raise RuntimeError("the run fails")

    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("hypha_local.processes.TERM_TIMEOUT", 0.5)
        anyio.run(main, backend="trio")
    assert time.monotonic() - started < 20
    assert not any(_alive(pid) for pid in pids)


def test_a_program_that_ends_early_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_processes(tmp_path) as processes:
            processes.start("node", [sys.executable, "-c", "import sys; sys.exit('no certificate')"])
            with anyio.fail_after(20):
                await processes.watch(["node"])

    with pytest.raises(ProcessFailedError, match=r"(?s)node ended with status 1.*no certificate"):
        anyio.run(main, backend="trio")


def test_a_step_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_processes(tmp_path) as processes:
            await processes.run("slow", [sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.3)

    with pytest.raises(ProcessFailedError, match="slow was not done within"):
        anyio.run(main, backend="trio")


def test_children_do_not_inherit_what_would_change_every_node() -> None:
    kept = child_environment({"PATH": "/bin", "HYPHA_KEY_PEM": "x", "OTEL_SERVICE_NAME": "y", "HOME": "/h"})
    assert kept == {"PATH": "/bin", "HOME": "/h"}


def test_events_are_read_once_and_whole(tmp_path: Path) -> None:
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


def test_what_is_shown_is_shown_whole() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=40), rounds=3)
    display.event({"event": "failed", "error": "no /a[/b] in [cb38] " + "long " * 20 + "end"})
    display.step("pip install 'hypha-local[plot]'")
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("job failed: no /a[/b] in [cb38] " + "long " * 20 + "end")
    assert lines[1].endswith("pip install 'hypha-local[plot]'")


def test_who_is_lost_or_late_is_shown() -> None:
    out = io.StringIO()
    display = Display(Console(file=out), rounds=3)
    display.event({"event": "worker_lost", "worker": "12D3a", "reason": "its lease was not renewed"})
    display.event({"event": "worker_late", "worker": "12D3b", "round": 2, "seconds": 31.24})
    lost, late = out.getvalue().splitlines()
    assert lost.endswith("worker lost: 12D3a: its lease was not renewed")
    assert late.endswith("worker late: 12D3b: round 2 continued without it after 31.2 s")


def test_a_round_that_took_no_measurable_time_is_shown() -> None:
    shown = io.StringIO()
    Display(Console(file=shown), rounds=1).event(
        {"event": "round", "round": 1, "loss": 0.5, "samples_per_second": None}
    )
    assert "round 1/1: loss 0.5000  0 samples/s" in shown.getvalue()


def test_the_summary_counts_parameters_and_compares_traffic(tmp_path: Path) -> None:
    tensors = {"w": np.zeros((3, 4), np.float32), "bn.running_mean": np.zeros(5, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert count_parameters(tmp_path) == 12
    worker = {"peer": "p", "samples": 160, "batches": 10, "bytes_sent": 100, "bytes_received": 50}
    result = {"rounds": 2, "samples": 320, "workers": [worker] * 2, "placement_seconds": 0.5, "wall_seconds": 3.0}
    summary = summarise(result, {"accuracy": 0.5, "loss": 1.0}, seed=1, wall_seconds=9.0, model_dir=tmp_path)
    assert summary.per_step_bytes_per_worker == 10 * 12 * 4
    assert summary.traffic_ratio == 4.8
    assert json.loads(summary.as_json())["bytes_sent_per_worker"] == 100
    assert "0.5000" in summary.as_text()


def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from hypha_local.processes import Processes\n"
        "child = Processes(Path(sys.argv[1])).start('child', [sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
