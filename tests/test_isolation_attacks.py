"""Attacks of jobs on a real worker: its owner's files and sockets, other jobs, the machine, and outliving the job.

Each attack is a task whose code tries it, and writes what it got. A test names the layers of which one must hold the
attack back, and is skipped on a machine where none of them works; what needs no layer always runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from support.task_network import Submission, TaskNetwork, running
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SANDBOXES: Final = ("bubblewrap", "landlock")
"""Layers that keep a job from the owner's and other jobs' files."""
TREES: Final = ("cgroup", "bubblewrap", "supervisor")
"""Layers that end all processes of a job."""
OUTLIVES: Final = 5.0
"""Seconds within which no process of a job is left, after its end or its worker's."""
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
def drain(path):
    folder = os.open(os.path.dirname(path), os.O_PATH)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        client.sendall(b'{"drain": {"timeout": 0}}')
        client.shutdown(socket.SHUT_WR)
        return client.makefile().read()
def connect(path):
    folder = os.open(os.path.dirname(path), os.O_PATH)  # the path may be too long for an address
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2)
        return client.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
def report(found):
    pathlib.Path("found.json").write_text(json.dumps(found))
"""


DISABLED: Final = {"all-layers": [], "no-bubblewrap": ["bubblewrap"]}
"""Layers that the worker's owner disables, as where user namespaces are refused."""


@pytest.fixture(scope="module", params=DISABLED)
def disabled(request: pytest.FixtureRequest) -> list[str]:
    return DISABLED[request.param]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, disabled: list[str]) -> Iterator[TaskNetwork]:
    root: Path = tmp_path_factory.mktemp("attacks") / "run"
    with open_network(root, disabled) as running:
        yield running


@contextmanager
def open_network(root: Path, disabled: list[str]) -> Iterator[TaskNetwork]:
    """Run a network with one worker, whose owner disables layers."""
    network = TaskNetwork(root, workers=1, leases=4)
    network.extend("worker-1", f"[isolation]\ndisable = {json.dumps(disabled)}\n")
    with running(network):
        yield network


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory, disabled: list[str]) -> set[str]:
    """Return the names of the layers that work on this machine, for this user, and are not disabled."""
    stack = pytest.importorskip("hypha_worker.executors.isolation.stack", reason="no layer is applied yet")
    return {layer.name for layer in stack.make_stack(tmp_path_factory.mktemp("probe"), disabled=disabled).layers}


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
        pytest.skip(
            f"none of the layers {', '.join(names)} works here; these do: {', '.join(sorted(layers)) or 'none'}"
        )


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


def wait_until_gone(word: str, seconds: float = OUTLIVES) -> None:
    wait_until(lambda: not processes_with(word), seconds, f"the end of all processes with {word}")


# ----------------------------------------------------------------------------------------------------- files, sockets


def test_the_owners_files_are_out_of_reach(network: TaskNetwork, layers: set[str]) -> None:
    need_one(layers, *SANDBOXES)
    files = owner_files(network)
    assert all(Path(path).exists() for path in files)
    job = network.submit([task("owner", f"report([attempt(read, path) for path in {files!r}])")])
    assert set(found(job, "owner")) <= HELD


def test_the_owners_control_socket_is_out_of_reach(network: TaskNetwork, layers: set[str]) -> None:
    need_one(layers, *SANDBOXES)
    control = worker_folder(network) / "control" / "worker.sock"
    assert control.is_socket()
    job = network.submit([task("control", f"report(attempt(drain, {str(control)!r}))")])
    answer = found(job, "control")
    if "bubblewrap" in layers:
        assert answer in HELD
    else:  # landlock allows the connection, and the worker refuses the command
        assert answer in HELD or "a process in a sandbox may not control the worker" in answer


def test_another_jobs_folder_and_socket_are_out_of_reach(network: TaskNetwork, layers: set[str]) -> None:
    need_one(layers, *SANDBOXES)
    secretive = "pathlib.Path('secret').write_text('s3cret'); import time; time.sleep(60)"
    victim = network.submit([task("victim", secretive, reports=False)])
    wait_until(lambda: list(worker_folder(network).glob("hypha-*/secret")), 30, "the victim's secret")
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


LINKS: Final = {
    "symbolic": "os.symlink(target, 'out')",
    "folder": "os.symlink(os.path.dirname(target), 'out')",
    "below": "os.mkdir('out'); os.symlink(target, 'out/key')",
    "fifo": "os.mkfifo('out')",
}


@pytest.mark.parametrize("kind", LINKS)
def test_an_output_leads_to_no_other_file(network: TaskNetwork, kind: str) -> None:
    key = network.folders.certificates / "worker-1-key.pem"
    code = f"target = {str(key)!r}\n{LINKS[kind]}"
    job = network.submit([task("leak", code, reports=False, outputs={"out": "out"})])
    error = job.wait_for_failure(60)
    assert "out" in error
    assert key.read_text() not in error
    assert not list((job.directory / "results").rglob("out*"))


def test_an_output_is_no_hard_link_to_the_owners_file(network: TaskNetwork) -> None:
    bait = network.shared / "bait"
    bait.write_text("the owner's")
    code = f"attempt(os.link, {str(bait)!r}, 'out')"
    job = network.submit([task("link", code, outputs={"out": "out"})])
    assert "out" in job.wait_for_failure(60)
    assert not list((job.directory / "results").rglob("out*"))


# ------------------------------------------------------------------------------------------------------------- limits


def test_twice_the_memory_of_the_lease_ends_the_job_with_the_reason(network: TaskNetwork, layers: set[str]) -> None:
    need_one(layers, "cgroup")
    code = "blocks = [os.urandom(1 << 20) * 16 for _ in range(25)]; report('kept 400 MB')"
    job = network.submit([task("glutton", code, needs={"memory": 0.2})])
    error = job.wait_for_failure(60)
    assert "memory" in error
    assert "0.2 GB" in error


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
    wait_until_gone(word)


def test_a_full_disk_is_the_error_of_the_job_that_filled_it(network: TaskNetwork) -> None:
    neighbour = network.submit([task("neighbour", "import time; time.sleep(8); report('undisturbed')")])
    code = """
import time
for number in range(40):
    pathlib.Path(f"fill-{number}").write_bytes(bytes(10 << 20))
    time.sleep(0.05)
time.sleep(30)
"""
    job = network.submit([task("filler", code, reports=False, needs={"storage": 0.1})])
    assert "storage" in job.wait_for_failure(60)
    assert found(neighbour, "neighbour") == "undisturbed"


# ---------------------------------------------------------------------------------------------------------- processes


def detached(word: str) -> str:
    """Return code that starts a process which keeps nothing by which it could be found as the job's."""
    return f"""
import subprocess, sys
sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(120)", {word!r}]
subprocess.Popen(["/usr/bin/env", "-i", "/usr/bin/setsid", "--fork", *sleeper])
"""


def test_a_process_that_has_detached_is_gone_with_its_job(network: TaskNetwork, layers: set[str], word: str) -> None:
    need_one(layers, *TREES)
    code = f"{detached(word)}\nimport time; time.sleep(1); report('left it')"
    assert found(network.submit([task("parent", code)]), "parent") == "left it"
    wait_until_gone(word)


def test_a_worker_that_is_killed_leaves_no_process(
    tmp_path: Path, disabled: list[str], layers: set[str], word: str
) -> None:
    need_one(layers, "bubblewrap", "supervisor")
    with open_network(tmp_path / "run", disabled) as network:
        job = network.submit([task("orphan", f"{detached(word)}\nimport time; time.sleep(120)", reports=False)])
        wait_until(lambda: processes_with(word), 30, "the detached process")
        network.kill("worker-1")
        wait_until_gone(word)
        job.process.kill()
        job.process.wait()
