"""Attacks of jobs on a real worker: its owner's files and sockets, other jobs, the machine, and outliving the job.

Each attack is a task whose code tries it, and writes what it got. A test names the layers of which one must hold the
attack back, and is skipped on a machine where none of them works; what needs no layer always runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from support.local_network import running
from support.requirements import skip_outside_ci
from support.task_network import Submission, TaskNetwork
from support.waiting import wait_until

from hypha_worker.executors.isolation.stack import make_stack

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(180)]

SANDBOXES: Final = ("bubblewrap", "landlock")
"""Layers that keep a job from the owner's and other jobs' files."""
TREES: Final = ("cgroup", "bubblewrap", "supervisor")
"""Layers that end all processes of a job."""
HELD: Final = {"PermissionError", "FileNotFoundError"}
"""What an attempt at something that is held back ends with."""

TRY = """
import os, socket
def attempt(action, *arguments):
    try:
        return repr(action(*arguments))[:200]
    except Exception as error:
        return type(error).__name__
def read(path):
    with open(path, "rb") as file:
        return file.read(100)
def connect(path):
    folder = os.open(os.path.dirname(path), os.O_PATH)  # the path may be too long for an address
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2)
        return client.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
def report(found):
    pathlib.Path("found.json").write_text(json.dumps(found))
"""

POST: Final = """
def post(route, value, folder="."):
    body = json.dumps(value).encode()
    head = f"POST {route} HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\ncontent-length: {len(body)}"
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(f"/proc/self/fd/{os.open(folder, os.O_PATH)}/bridge.sock")
        try:
            client.sendall(f"{head}\\r\\n\\r\\n".encode() + body)
        except BrokenPipeError:  # it was answered before
            pass
        return client.recv(1 << 16)
"""


DISABLED: Final = {"all-layers": [], "no-bubblewrap": ["bubblewrap"]}
"""Layers that the worker's owner disables, as where user namespaces are refused."""


@pytest.fixture(scope="module", params=DISABLED)
def disabled(request: pytest.FixtureRequest) -> list[str]:
    return DISABLED[request.param]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, disabled: list[str]) -> Iterator[TaskNetwork]:
    """Run a network with one worker, whose owner disables layers."""
    network = TaskNetwork(tmp_path_factory.mktemp("attacks") / "run", workers=1, leases=4)
    network.extend("worker-1", f"[isolation]\ndisable = {json.dumps(disabled)}\n")
    with running(network):
        yield network


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory, disabled: list[str]) -> set[str]:
    """Return the names of the layers that work on this machine, for this user, and are not disabled."""
    return {layer.name for layer in make_stack(tmp_path_factory.mktemp("probe"), disabled=disabled).layers}


@pytest.fixture
def word() -> Iterator[str]:
    """Return an argument that marks the processes of an attack; those that are left at the end are killed."""
    made = f"attack-{time.monotonic_ns()}"
    yield made
    for process in processes_with(made):
        with suppress(psutil.Error):
            process.kill()


def need_one(layers: set[str], *names: str) -> None:
    if not layers & set(names):
        works = ", ".join(sorted(layers)) or "none"
        skip_outside_ci(f"none of the layers {', '.join(names)} works here; these do: {works}")


def task(name: str, code: str, *, reports: bool = True, **more: Any) -> dict[str, Any]:
    """Return a task that runs code after `TRY`; it has the output ``found`` if it `reports`."""
    settings = {"code": f"import pathlib\n{TRY}\n{code}"}
    more = {"outputs": {"found": "found.json"} if reports else {}, **more}
    return {"name": name, "driver": {"shell/python": settings}, "retries": 0, **more}


def found(job: Submission, name: str, seconds: float = 60.0) -> Any:
    """Return what the attack of a task got."""
    job.wait(seconds)
    return json.loads((job.directory / "results" / name / "found").read_text())


def owner_files(network: TaskNetwork) -> list[str]:
    """Return files of the worker's owner that no job may read."""
    certificates = network.folders.certificates
    return [str(path) for path in (certificates / "worker-1-key.pem", network.configuration("worker-1"))]


def worker_folder(network: TaskNetwork) -> Path:
    return network.folders.work / "worker-1"


def processes_with(word: str) -> list[psutil.Process]:
    """Return the processes with `word` among their arguments."""
    listed = []
    for process in psutil.process_iter():
        try:
            if any(word in argument for argument in process.cmdline()):
                listed.append(process)
        except psutil.Error:
            continue
    return listed


# ----------------------------------------------------------------------------------------------------- files, sockets


@pytest.mark.gate
def test_the_owners_files_are_out_of_reach(network: TaskNetwork, layers: set[str]) -> None:
    need_one(layers, *SANDBOXES)
    files = owner_files(network)
    assert all(Path(path).exists() for path in files)
    job = network.submit([task("owner", f"report([attempt(read, path) for path in {files!r}])")])
    assert set(found(job, "owner")) <= HELD


def test_another_jobs_folder_and_socket_are_out_of_reach(network: TaskNetwork, layers: set[str]) -> None:
    need_one(layers, *SANDBOXES)
    secretive = "pathlib.Path('secret').write_text('s3cret'); import time; time.sleep(60)"
    victim = network.submit([task("victim", secretive, reports=False)])
    wait_until(lambda: list(worker_folder(network).glob("hypha-*/secret")), 60, "the victim's secret")
    [secret] = worker_folder(network).glob("hypha-*/secret")
    sockets = [str(path) for path in worker_folder(network).rglob("*.sock") if path.name != "worker.sock"]
    code = f"""
secret = {str(secret)!r}
folder = os.path.dirname(secret)
files = [attempt(read, secret), attempt(open, os.path.join(folder, "planted"), "w")]
report([files, [attempt(os.listdir, folder), *(attempt(connect, path) for path in {sockets!r})]])
"""
    try:
        files, others = found(network.submit([task("thief", code)]), "thief")
    finally:
        victim.process.kill()
    assert set(files) <= HELD
    assert not (secret.parent / "planted").exists()
    if "bubblewrap" in layers:  # landlock allows what reveals names, and sockets by their path
        assert set(others) <= HELD


def test_another_jobs_bridge_takes_no_report(network: TaskNetwork) -> None:
    """Whatever layers work: the bridge knows by their ids which processes are its job's."""
    sends = "post('/task/update', {'message': 'own'}); pathlib.Path('victim').touch(); import time; time.sleep(60)"
    victim = network.submit([task("victim", f"{POST}\n{sends}", reports=False)])
    wait_until(lambda: victim.events("task_progress"), 60, "the victim's own report")
    [mark] = worker_folder(network).glob("hypha-*/victim")
    code = f"{POST}\nreport(attempt(post, '/task/update', {{'message': 'foreign'}}, {str(mark.parent)!r}))"
    try:
        answer = found(network.submit([task("liar", code)]), "liar")
        messages = {event["message"] for event in victim.events("task_progress")}
    finally:
        victim.process.kill()
    assert answer in HELD or ("403" in answer and "foreign-process" in answer)
    assert messages == {"own"}


def test_no_hard_link_to_the_owners_file_can_be_made(network: TaskNetwork, layers: set[str]) -> None:
    need_one(layers, *SANDBOXES)
    bait = network.shared / "bait"
    bait.write_text("the owner's")
    code = f"report([attempt(os.link, {str(bait)!r}, 'stolen'), os.path.lexists('stolen')])"
    refusal, is_there = found(network.submit([task("link", code)]), "link")
    assert refusal in HELD | {"OSError"}  # landlock refuses links between folders as if they were on two disks
    assert not is_there


# ------------------------------------------------------------------------------------------------------------- limits


def test_a_fork_bomb_ends_with_its_job(network: TaskNetwork, layers: set[str], word: str) -> None:
    need_one(layers, "cgroup", "bubblewrap")
    code = f"""
import subprocess, sys, time
started = 0
try:
    for _ in range(20000):
        subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(120)", {word!r}])
        started += 1
except OSError:
    pass
report(started)
"""
    started = found(network.submit([task("bomb", code, timeout=120)]), "bomb", 120)
    assert 0 < started < 20000
    assert processes_with(word) == []


# ---------------------------------------------------------------------------------------------------------- processes


def detached(word: str) -> str:
    """Return code that starts a process that nothing shows to be the job's, and waits for it."""
    return f"""
import subprocess, sys, time
sleeper = [sys.executable, "-I", "-S", "-c", "import time; open('runs', 'w').close(); time.sleep(120)", {word!r}]
subprocess.Popen(["/usr/bin/env", "-i", "/usr/bin/setsid", "--fork", *sleeper])
while not os.path.exists("runs"):
    time.sleep(0.01)
"""


@pytest.mark.gate
def test_a_process_that_has_detached_is_gone_with_its_job(network: TaskNetwork, layers: set[str], word: str) -> None:
    need_one(layers, *TREES)
    assert found(network.submit([task("parent", f"{detached(word)}\nreport('left it')")]), "parent") == "left it"
    assert processes_with(word) == [], "a task's end is reported after the end of its processes"
