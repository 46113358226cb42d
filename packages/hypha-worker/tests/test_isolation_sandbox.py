"""What an executor's process sees and may do: in the sandbox and without bubblewrap, for workers of root and of others.

Each test runs a worker's `ProcessRunner` in a process of its own; root's tests also become an ordinary user.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.confined_runs import NOBODY, ConfinedRuns, require_layer, users
from support.process_ready import is_alive
from support.waiting import wait_until

from hypha_worker.executors.isolation.own_uid import COUNT, FIRST_UID
from hypha_worker.work_dir import work_dir_key

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")
NO_SANDBOX: dict[str, Any] = {"disabled": ["bubblewrap"]}
in_each_sandbox = pytest.mark.parametrize(
    ("layer", "options"), [("bubblewrap", {}), ("landlock", NO_SANDBOX)], ids=["sandbox", "landlock"]
)
each_stack = pytest.mark.parametrize("disabled", [[], ["bubblewrap"], ["bubblewrap", "cgroup"]], ids=str)
LOOKS = """
import json, os, sys
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return type(error).__name__
def read(path):
    with open(path) as file:
        return file.read()
def write(path):
    with open(path, "w") as file:
        return file.write("x")
def status(name):
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name + ":"))
def connect(path):
    import socket
    socket.socket(socket.AF_UNIX).connect(path)
    return "connected"
folder = os.path.dirname(os.path.dirname(os.environ["HOME"]))
"""
HIDDEN = ("FileNotFoundError", "PermissionError")


def own(runs: ConfinedRuns, *paths: Path) -> None:
    """Let the user of the runs own files."""
    if runs.as_nobody:
        for path in paths:
            os.chown(path, NOBODY, NOBODY)


@pytest.fixture(params=users())
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> ConfinedRuns:
    """Starts runs; beside the worker's folder lies its key, and in it another job with a socket."""
    made = ConfinedRuns(tmp_path, as_nobody=request.param)
    tmp_path.chmod(0o755)
    (tmp_path / "key.pem").write_text("private")
    sibling = tmp_path / "work" / "hypha-sibling"
    sibling.mkdir(parents=True)
    control = tmp_path / "work" / "control"
    control.mkdir()
    (sibling / "data").write_text("private")
    private = (tmp_path / "key.pem", tmp_path / "work", sibling, sibling / "data", control)
    for path in private:
        path.chmod(0o700)
    own(made, *private)
    return made


@pytest.fixture
def sockets(runs: ConfinedRuns) -> Iterator[None]:
    """Sockets of the worker's owner and of another job listen in the worker's folder."""
    with socket.socket(socket.AF_UNIX) as control, socket.socket(socket.AF_UNIX) as bridge:
        for listener, name in ((control, "control/worker.sock"), (bridge, "hypha-sibling/bridge.sock")):
            with contextlib.chdir(runs.work_dir):  # pytest's folders have long paths
                listener.bind(name)
            listener.listen()
            own(runs, runs.work_dir / name)
        yield


SEES = """
found = {
    "key": attempt(read, folder + "/key.pem"),
    "data": attempt(read, folder + "/work/hypha-sibling/data"),
    "control": attempt(connect, folder + "/work/control/worker.sock"),
    "bridge": attempt(connect, folder + "/work/hypha-sibling/bridge.sock"),
    "shadow": attempt(read, "/etc/shadow"),
    "home": attempt(os.listdir, "/root"),
    "tmp": attempt(os.listdir, "/tmp"),
    "usr": attempt(write, "/usr/x"),
    "given": attempt(read, "given"),
    "own": attempt(write, "given"),
    "temporary": attempt(write, os.environ["TMPDIR"] + "/x"),
    "own bridge": attempt(connect, "bridge.sock"),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
}
print(json.dumps(found))
"""


INTERPRETER = (Path(sys.prefix), Path(sys.base_prefix))
"""What a job's program belongs to; a checkout may lie in /tmp."""


@pytest.mark.usefixtures("sockets")
def test_a_job_sees_its_own_folder_and_the_system_only(runs: ConfinedRuns) -> None:
    found = runs.run(LOOKS + SEES, "bubblewrap").answer
    assert {found[name] for name in ("key", "data", "control", "bridge", "shadow")} <= {*HIDDEN}
    assert found["home"] in (*HIDDEN, [".pyenv"], [".local"])
    assert set(found["tmp"]) <= {path.parts[2] for path in (runs.folder, *INTERPRETER) if path.is_relative_to("/tmp")}
    assert found["usr"] in ("OSError", "PermissionError")
    assert (found["given"], found["own"], found["temporary"]) == ("by the worker", 1, 1)
    assert found["own bridge"] == "connected"
    assert found["processes"] <= 3
    owner = NOBODY if runs.as_nobody else os.geteuid()
    assert {path.stat().st_uid for path in (runs.work_dir / "hypha-job").rglob("*")} == {owner}


@pytest.mark.usefixtures("sockets")
def test_without_bubblewrap_landlock_refuses_files_of_others(runs: ConfinedRuns) -> None:
    found = runs.run(LOOKS + SEES, "landlock", **NO_SANDBOX).answer
    assert {found[name] for name in ("key", "data", "shadow")} == {"PermissionError"}
    assert found["usr"] == "PermissionError"
    assert (found["given"], found["own"], found["temporary"]) == ("by the worker", 1, 1)
    assert found["own bridge"] == "connected"


def test_without_bubblewrap_landlock_refuses_device_nodes_but_the_usual_ones(runs: ConfinedRuns) -> None:
    script = """
names = ("null", "urandom", "ptmx")
print(json.dumps([type(attempt(os.open, f"/dev/{name}", os.O_RDONLY)).__name__ for name in names]))
"""
    assert runs.run(LOOKS + script, "landlock", **NO_SANDBOX).answer == ["int", "int", "str"]


PRIVILEGES = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
found = {
    "uid": os.getuid(),
    "caps": [status(name) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd")],
    "no new": status("NoNewPrivs"),
    "namespace": (libc.unshare(0x10000000), ctypes.get_errno()),
    "clone3": (libc.syscall(435, None, 0), ctypes.get_errno()),
    "user": attempt(os.setuid, 0),
}
umask = os.umask(0)
print(json.dumps(found | {"umask": umask}))
"""


def test_a_job_has_no_privileges_and_makes_no_user_namespace(runs: ConfinedRuns) -> None:
    run = runs.run(LOOKS + PRIVILEGES, "bubblewrap")
    found = run.answer
    if run.findings["own-uid"]:
        assert FIRST_UID <= found["uid"] < FIRST_UID + COUNT
    assert {int(each, 16) for each in found["caps"]} == {0}
    assert found["no new"] == "1"
    assert found["namespace"] == [-1, 1]  # EPERM
    assert found["clone3"] == [-1, 38]  # ENOSYS
    assert found["user"] in ("PermissionError", "OSError")  # EINVAL: the namespace maps no root
    assert found["umask"] == 0o077


def test_only_root_gives_each_run_a_uid_of_its_own(runs: ConfinedRuns) -> None:
    findings = runs.run("").findings
    if runs.as_nobody or os.geteuid() != 0:
        assert not findings["own-uid"]
    else:
        require_layer("own-uid", findings)


def test_without_bubblewrap_a_job_has_no_privileges(runs: ConfinedRuns) -> None:
    found = runs.run(LOOKS + PRIVILEGES, "landlock", **NO_SANDBOX).answer
    *held, bounding = (int(each, 16) for each in found["caps"])
    assert set(held) == {0}
    assert bounding == 0 or found["uid"] != 0
    assert (found["no new"], found["umask"]) == ("1", 0o077)


NETWORK = """
import socket
def dial(port):
    socket.create_connection(("127.0.0.1", port))
    return "connected"
print(json.dumps([attempt(dial, int(sys.argv[1])), attempt(connect, "bridge.sock")]))
"""


@in_each_sandbox
@pytest.mark.parametrize("allowed", [True, False])
def test_the_network_is_there_as_configured_and_the_bridge_always(
    runs: ConfinedRuns, layer: str, options: dict[str, Any], allowed: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        tcp, bridge = runs.run(LOOKS + NETWORK, layer, args=[port], network=allowed, **options).answer
    assert bridge == "connected"
    if allowed:
        assert tcp == "connected"
    else:
        assert tcp in ("PermissionError", "ConnectionRefusedError", "OSError")


@in_each_sandbox
def test_readable_and_writable_paths_are_the_owners_choice(
    runs: ConfinedRuns, layer: str, options: dict[str, Any]
) -> None:
    places = {name: runs.folder / name for name in ("readable", "writable", "argument", "closed")}
    for name, place in places.items():
        place.mkdir(mode=0o755)
        (place / "file").write_text(name)
        (place / "file").chmod(0o600)  # of its owner, who names it
        own(runs, place, place / "file")
    script = """
result = [[attempt(read, f"{folder}/{name}/file"), attempt(write, f"{folder}/{name}/new")]
          for name in ("readable", "writable", "argument", "closed")]
print(json.dumps(result))
"""
    asked = {"readable": [places["readable"]], "writable": [places["writable"]], "args": [str(places["argument"])]}
    readable, writable, argument, closed = runs.run(LOOKS + script, layer, **asked, **options).answer
    assert (readable[0], writable[0], argument[0]) == ("readable", "writable", "argument")
    assert closed[0] in HIDDEN
    assert writable[1] == 1
    assert {readable[1], argument[1], closed[1]} <= {"OSError", *HIDDEN}
    assert (places["writable"] / "new").stat().st_uid == places["writable"].stat().st_uid


@in_each_sandbox
def test_an_argument_may_name_a_link_in_a_folder_that_is_shown(
    runs: ConfinedRuns, layer: str, options: dict[str, Any]
) -> None:
    """Such as the interpreter of a virtual environment: that of the program, or one in a readable folder."""
    environment, target = runs.folder / "environment", runs.folder / "interpreter"
    environment.mkdir(mode=0o755)
    target.write_text("interpreter")
    target.chmod(0o644)
    (environment / "link").symlink_to(target)
    script = 'print(json.dumps(attempt(read, f"{folder}/environment/link")))'
    arguments = [str(environment / "link"), sys.executable]
    assert runs.run(LOOKS + script, layer, readable=[environment], args=arguments, **options).answer == "interpreter"


@pytest.mark.parametrize("way", [".", "link"], ids=["folder", "link"])
@pytest.mark.parametrize("named", ["readable", "args"])
def test_private_files_stay_hidden_in_a_folder_that_is_shown(runs: ConfinedRuns, named: str, way: str) -> None:
    """What a readable folder or a link leads to, the sandbox covers with an empty file."""
    (runs.folder / "link").symlink_to(runs.folder)
    paths = [f"{way}/key.pem", f"{way}/work/hypha-sibling/data", "key.pem"]
    script = f'print(json.dumps([attempt(read, f"{{folder}}/{{name}}") for name in {paths!r}]))'
    key, data, direct = runs.run(LOOKS + script, "bubblewrap", **{named: [str(runs.folder / way)]}).answer
    assert data in HIDDEN
    covered = set() if (named, way) == ("args", ".") else {""}
    assert {key, direct} <= covered | {*HIDDEN}


KERNEL_FILES = """
print(json.dumps({
    "sysctl": attempt(lambda: open("/proc/sys/kernel/core_pattern", "r+").close()),
    "dev": attempt(write, "/dev/fill"),
    "null": attempt(write, "/dev/null"),
    "shm": attempt(write, "/dev/shm/x"),
}))
"""


@pytest.mark.parametrize("disabled", [[], ["own-uid"]], ids=str)
def test_a_job_changes_no_kernel_settings_and_no_devices(runs: ConfinedRuns, disabled: list[str]) -> None:
    """Root without a uid of its own could set core_pattern, a command that the kernel runs as root outside."""
    found = runs.run(LOOKS + KERNEL_FILES, "bubblewrap", disabled=disabled).answer
    assert found["sysctl"] in ("PermissionError", "OSError", "FileNotFoundError")
    assert found["dev"] in ("PermissionError", "OSError")
    assert (found["null"], found["shm"]) == (1, 1)


KERNEL_CALLS = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments))
    return result if result < 0 else 0, ctypes.get_errno() if result < 0 else 0
add_key, request_key, keyctl = (248, 249, 250) if platform.machine() == "x86_64" else (217, 218, 219)
unshare = 272 if platform.machine() == "x86_64" else 97
print(json.dumps([
    call(keyctl, 6, -3, 0, 0),
    call(keyctl, 11, -3, 0, 0),
    call(add_key, b"user", b"hypha-test", b"x", 1, -2),
    call(request_key, b"user", b"hypha-test", 0, 0),
    call(unshare, 0x10000000),
]))
"""


@in_each_sandbox
def test_a_job_uses_no_keyrings_and_makes_no_user_namespace(
    runs: ConfinedRuns, layer: str, options: dict[str, Any]
) -> None:
    """The session keyring is the worker's: a process inherits it through all namespaces."""
    found = runs.run(LOOKS + KERNEL_CALLS, layer, **options).answer
    assert found == [[-1, 1]] * 5  # EPERM


BINDS_MARKS = """
import socket
kept = []
for uid in range(int(sys.argv[1]), int(sys.argv[2])):
    kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    attempt(kept[-1].bind, f"\\0hypha-uid-{uid}")
print("bound", flush=True)
import time
time.sleep(60)
"""


def test_a_job_cannot_take_the_uids_of_other_jobs(runs: ConfinedRuns) -> None:
    """With the machine's network it shares abstract sockets, which marked the uids in use."""
    require_layer("bubblewrap", runs.run("").findings)
    taker = [sys.executable, "-c", LOOKS.partition("folder =")[0] + BINDS_MARKS, str(FIRST_UID), str(FIRST_UID + COUNT)]
    with subprocess.Popen(taker, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "bound\n"
            run = runs.run("print('ran')")
        finally:
            process.kill()
    assert run.lines == ["ran"], run


@in_each_sandbox
def test_a_link_in_a_writable_folder_shows_the_next_job_nothing(
    runs: ConfinedRuns, layer: str, options: dict[str, Any]
) -> None:
    """A job replaces a folder in `writable`, which a variable names, by a link to what it wants to read."""
    cache, models, secret = (runs.folder / name for name in ("cache", "cache/models", "secret"))
    for path in (cache, models, secret):
        path.mkdir(mode=0o755)
        own(runs, path)
    (secret / "data").write_text("secret")
    options = {**options, "writable": [cache], "env": {"HF_HOME": str(models)}}
    first = 'print(json.dumps(attempt(write, os.environ["HF_HOME"] + "/file")))'
    assert runs.run(LOOKS + first, layer, **options).answer == 1
    (models / "file").unlink()
    models.rmdir()
    models.symlink_to(secret)
    reads = 'print(json.dumps([attempt(read, p + "/data") for p in (os.environ["HF_HOME"], folder + "/secret")]))'
    assert set(runs.run(LOOKS + reads, layer, **options).answer) <= {*HIDDEN}


WRITES = 'open("large", "wb").truncate(2_000_000)'


def test_a_file_is_at_most_as_large_as_the_storage_and_the_end_names_the_limit(runs: ConfinedRuns) -> None:
    run = runs.run(WRITES, storage=1_000_000)
    assert run.exit_code == 1
    assert "File too large" in run.lines[-1]
    assert runs.run(WRITES.replace("large", "again"), storage=3_000_000).exit_code == 0
    run = runs.run(f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL); {WRITES}", storage=1_000_000)
    assert run.exit_code == -signal.SIGXFSZ
    assert "more than the 0.001 GB of its lease (storage): request more" in (run.error or "")


TERMINATED = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), os._exit(7)))
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""


@pytest.mark.parametrize("options", [{}, NO_SANDBOX], ids=["sandbox", "supervisor"])
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("raise SystemExit(3)", 3),
        (TERMINATED, 7),
    ],
)
def test_a_run_ends_as_its_command_has(runs: ConfinedRuns, options: dict[str, Any], script: str, code: int) -> None:
    assert runs.run(script, **options).exit_code == code


LEAVES_AN_ORPHAN = """
import os, subprocess, sys, time
command = ["/usr/bin/env", "-i", "setsid", "sh", "-c", "touch ready; exec sleep 987654"]
subprocess.Popen(command, stdin=subprocess.DEVNULL)
while not os.path.exists("ready"):
    time.sleep(0.01)
"""


def sleepers(pause: str = "987654") -> list[psutil.Process]:
    """Return the processes that run ``sleep`` for that many seconds."""
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", pause]]


@each_stack
def test_orphans_without_environment_end_with_their_job(runs: ConfinedRuns, disabled: list[str]) -> None:
    pause = str(900_000 + os.getpid())
    run = runs.run(LEAVES_AN_ORPHAN.replace("987654", pause), disabled=disabled)
    assert run.exit_code == 0, run
    assert sleepers(pause) == []


@pytest.mark.nightly
@each_stack
def test_orphans_of_a_job_that_ignores_sigterm_end_with_it(runs: ConfinedRuns, disabled: list[str]) -> None:
    pause = str(700_000 + os.getpid())
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = f"{ignoring}\n{LEAVES_AN_ORPHAN.replace('987654', pause)}\ntime.sleep(60)"
    run = runs.run(script, disabled=disabled, cancelled=True)
    assert run.exit_code == -signal.SIGKILL, run
    assert sleepers(pause) == []


@each_stack
def test_a_killed_worker_leaves_no_process_and_nothing_in_the_way_of_the_next(
    runs: ConfinedRuns, disabled: list[str]
) -> None:
    pause = str(800_000 + os.getpid())
    script = LEAVES_AN_ORPHAN.replace("987654", pause) + "\nprint('on')\ntime.sleep(60)"
    worker = subprocess.Popen(runs.command(script, disabled=disabled), stdout=subprocess.PIPE, text=True)
    with worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "started\n"
        wait_until(lambda: bool(sleepers(pause)), 30, "the orphan begins")
        before = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    wait_until(lambda: not sleepers(pause) and not any(map(is_alive, before)), 30, "all processes end")
    assert runs.run("", disabled=disabled).exit_code == 0
    left = [path.parent for path in Path("/sys/fs/cgroup").rglob(f"hypha-{work_dir_key(runs.work_dir)}.*/cgroup.procs")]
    assert left == []


@pytest.mark.nightly
def test_a_process_outlives_the_thread_that_trio_would_start_it_in(runs: ConfinedRuns) -> None:
    """trio's threads retire after 10 s without work; PR_SET_PDEATHSIG would kill the sandbox then."""
    run = runs.run("import time; time.sleep(15); print(json.dumps('done'))".replace("import time", "import json, time"))
    assert (run.exit_code, run.lines[-1:]) == (0, ['"done"'])


def test_the_environment_holds_what_is_listed_and_no_secret(runs: ConfinedRuns) -> None:
    environment = {
        **os.environ,
        "HYPHA_KEY_PEM": "secret",
        "OTEL_EXPORTER_OTLP_HEADERS": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "UV_PUBLISH_TOKEN": "secret",
        "UV_INDEX_PRIVATE_PASS": "secret",
        "UV_INDEX_URL": "https://me:secret@example.org/simple",
        "HTTPS_PROXY": "http://secret",
        "HF_TOKEN": "secret",
        "CUDA_CACHE_DISABLE": "1",
        "LC_TIME": "C",
        "PYTHONPATH": "",
    }
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    found = runs.run(script, environment=environment, env={"HF_TOKEN": "the executor's", "LC_TIME": "C.UTF-8"}).answer
    assert "secret" not in json.dumps(found)
    assert found["HF_TOKEN"] == "the executor's"
    assert (found["CUDA_CACHE_DISABLE"], found["LC_TIME"]) == ("1", "C.UTF-8")
    hidden = {"PYTHONPATH", "UV_PUBLISH_TOKEN", "UV_INDEX_PRIVATE_PASS", "UV_INDEX_URL", "HYPHA_KEY_PEM", "HTTPS_PROXY"}
    assert not hidden & set(found)
    assert found["HOME"] == str(runs.work_dir / "hypha-job")
    assert found["TMPDIR"].startswith(found["HOME"])
