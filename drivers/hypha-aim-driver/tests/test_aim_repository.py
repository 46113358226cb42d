"""With AIM itself: metrics become runs in a directory and on an `aim server`, and `aim up` shows them.

AIM is installed with the driver, as its README says, into an environment of its own; HYPHA_AIM_PYTHON names an
interpreter that has both already.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.loopback_ports import free_port

ROOT = Path(__file__).parents[3]
A = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
B = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
JOB, OTHER = "6f6d1c54-6b5f-4e0f-8d7c-0f3c5a1b2d3e", "0b9c2d1e-1111-4222-8333-444455556666"
PYTHONS = ("python3.12", "python3.11")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

READ = """
import json, sys
from aim import Repo, Run
from aim.sdk.index_manager import RepoIndexManager

repo = Repo(sys.argv[1])
for run_hash in repo.list_all_runs():
    RepoIndexManager.get_index_manager(repo).index(run_hash)
repo, found = Repo(sys.argv[1]), []
for run_hash in repo.list_all_runs():
    run = Run(run_hash, repo=repo, read_only=True)
    for metric in run.metrics():
        steps, (values, *_) = metric.data.numpy()
        series = sorted(zip(map(int, steps), map(float, values)))
        found.append([run.name, run.experiment, metric.context.to_dict(), metric.name, series])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a Python interpreter with the driver and AIM."""
    if "HYPHA_AIM_PYTHON" in os.environ:
        return Path(os.environ["HYPHA_AIM_PYTHON"])
    candidates = [sys.executable] if sys.version_info < (3, 13) else [shutil.which(name) for name in PYTHONS]
    base = next((path for path in candidates if path), None)
    assert base is not None, f"AIM needs one of {', '.join(PYTHONS)} on the PATH"
    folder = tmp_path_factory.mktemp("aim-environment")
    subprocess.run([base, "-m", "venv", folder], check=True, timeout=120)
    driver = f"hypha-aim-driver[aim] @ {(ROOT / 'drivers/hypha-aim-driver').as_uri()}"
    proto = f"hypha-proto @ {(ROOT / 'packages/hypha-proto').as_uri()}"
    subprocess.run([folder / "bin/pip", "install", "--quiet", proto, driver], check=True, timeout=500)
    return folder / "bin/python"


@contextmanager
def started(
    command: list[str | Path], log: Path, url: str, *, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in its own process group, ready when `url` responds; kill it at the end."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=cwd, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 120
        while get(url) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bytes(answer.read())
    except OSError:
        return None


@contextmanager
def driver(python: Path, repo: str, log: Path) -> Iterator[int]:
    """Run a driver; stop it with SIGTERM at the end, when it must have written everything."""
    port = free_port()
    command: list[str | Path] = [python.parent / "hypha-aim-driver", "--repo", repo, "--port", str(port)]
    with started(command, log, f"http://127.0.0.1:{port}/openapi.json") as process:
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


@contextmanager
def aim(python: Path, name: str, repo: Path, port: int, path: str) -> Iterator[str]:
    """Run `aim server` or `aim up`, ready when `path` responds."""
    base = f"http://127.0.0.1:{port}"
    command: list[str | Path] = [
        python.parent / "aim",
        name,
        "--repo",
        repo,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with started([*command, "-y"] if name == "server" else command, repo / f"{name}.log", base + path, cwd=repo):
        yield base


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def post(port: int, **fields: Any) -> int:
    body = {"worker_id": A, "round": 1, "metric_name": "loss", "value": 0.5} | fields
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/status", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def series(python: Path, repo: Path) -> list[list[Any]]:
    output = subprocess.run([python, "-c", READ, str(repo)], check=True, stdout=subprocess.PIPE, timeout=120).stdout
    return sorted(json.loads(output), key=str)


def test_metrics_become_runs_and_continue_after_a_restart(python: Path, tmp_path: Path) -> None:
    repo, log = tmp_path / "repo", tmp_path / "driver.log"
    with driver(python, str(repo), log) as port:
        for number in (1, 2):
            assert post(port, job_id=JOB, round=number, value=1 / number) == 200
            assert post(port, job_id=JOB, round=number, worker_id="nobody") == 422
            assert post(port, job_id=JOB, round=number, worker_id=B, value=2 / number) == 200
        assert post(port, job_id=OTHER, metric_name="samples_per_second", value=90) == 200
        assert post(port, round=7) == 200
    with driver(python, str(repo), log) as port:
        assert post(port, job_id=JOB, round=3, value=0.25) == 200
    assert series(python, repo) == [
        ["Hypha", "hypha", {"worker": A}, "loss", [[7, 0.5]]],
        [f"job {OTHER}", "hypha", {"worker": A}, "samples_per_second", [[1, 90.0]]],
        [f"job {JOB}", "hypha", {"worker": B}, "loss", [[1, 2.0], [2, 1.0]]],
        [f"job {JOB}", "hypha", {"worker": A}, "loss", [[1, 1.0], [2, 0.5], [3, 0.25]]],
    ]


def test_no_metric_is_lost_while_the_aim_server_is_down(python: Path, tmp_path: Path) -> None:
    repo, log, server = tmp_path / "repo", tmp_path / "driver.log", free_port()
    repo.mkdir()
    with ExitStack() as last_server, driver(python, f"aim://127.0.0.1:{server}", log) as port:
        assert post(port, job_id=JOB, round=1) == 200
        wait_for(log, "AIM does not accept metrics")
        with aim(python, "server", repo, server, "/status/"):
            assert post(port, job_id=JOB, round=2) == 200
            wait_for(log, "AIM accepts metrics again")
        assert post(port, job_id=JOB, round=3) == 200
        time.sleep(2)
        last_server.enter_context(aim(python, "server", repo, server, "/status/"))
        assert post(port, job_id=JOB, round=4) == 200
    assert series(python, repo) == [
        [f"job {JOB}", "hypha", {"worker": A}, "loss", [[1, 0.5], [2, 0.5], [3, 0.5], [4, 0.5]]]
    ]
    assert log.read_text().count("AIM does not accept metrics") <= 2  # once for each outage of the server
    with aim(python, "up", repo, free_port(), "/api/experiments/") as page:
        [experiment] = [e for e in json.loads(get(f"{page}/api/experiments/") or b"") if e["name"] == "hypha"]
        answer = json.loads(get(f"{page}/api/experiments/{experiment['id']}/runs/") or b"")
        assert [run["name"] for run in answer["runs"]] == [f"job {JOB}"]
