"""Lifecycle of daemon processes: signals, failures, forced end, health, and the limit of open files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.process_ready import first_line

from hypha_net.node.health import Readiness, serve_health
from hypha_net.rpc import call
from hypha_net.testing import MemoryNetwork
from hypha_proto.health import HEALTH_CHECK, HealthRequest

PROGRAM = """
import subprocess, sys, time
import anyio
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.lifecycle import run_daemon
from hypha_net.node.logging_setup import configure_logs
from hypha_net.testing import MemoryNetwork

class OwnError(Exception):
    pass

# blocking code sleeps in steps: a signal that arrives just before a blocking call is handled only when the call returns
STEPS = range(6000)

class SlowToGo:  # the interpreter prints and swallows what its destructor raises
    def __del__(self):
        print("running", flush=True)
        for _ in STEPS:
            time.sleep(0.1)

async def fails():
    await anyio.sleep(0)
    raise {"surprise": KeyError, "known": OwnError, "os": OSError}[behaviour]("words of the failure")

async def serve(config, node):
    if behaviour in ("surprise", "known", "os"):
        node.tasks.start_soon(fails)
    elif behaviour == "done":
        return
    drain = node.drain_on_sigterm(1.0 if behaviour == "drains too long" else 600.0) if "drain" in behaviour else None
    if behaviour == "holds on":
        child = subprocess.Popen(["sleep", "600"])
    node.readiness.ready()
    print("running", flush=True)
    if behaviour == "holds on":
        with anyio.CancelScope(shield=True):
            await anyio.sleep(600)
    if drain is not None:
        await drain.wait()
        print("draining", flush=True)
        if behaviour == "drains":
            await anyio.sleep(1.5)  # longer than the grace, which begins when the drain is over
            print("drained", flush=True)
            return
        with anyio.CancelScope(shield=behaviour == "drains too long"):
            await anyio.sleep(600)
    if behaviour == "blocks":
        for _ in STEPS:
            time.sleep(0.1)
    await anyio.sleep(600)

def connect(config, role):
    if behaviour == "slow to start":
        print("running", flush=True)
        for _ in STEPS:
            time.sleep(0.1)
    if behaviour == "slow destructor":
        SlowToGo()
    return MemoryNetwork().endpoint("node")

behaviour = sys.argv[1]
configure_logs("json")
addresses = ["/ip4/127.0.0.1/tcp/1"]
config = NodeConfig(cert_pem="c", key_pem="k", trust_pem="t", gateway_addresses=addresses)
sys.exit(run_daemon(config, serve, role="data", version="1", expected=(OwnError,), grace=0.5, connect=connect))
"""


class Daemon:
    """Process that runs PROGRAM."""

    def __init__(self, folder: Path, behaviour: str) -> None:
        script = folder / "program.py"
        script.write_text(PROGRAM)
        command = [sys.executable, str(script), behaviour]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_until_running(self) -> None:
        assert first_line(self.process) == "running"

    def begin_drain(self) -> None:
        """Send SIGTERM and wait until the program has heard of it."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "draining\n"

    def end(self, number: signal.Signals | None = None) -> tuple[int, list[dict[str, str]]]:
        """Return exit code and log; the program itself would take ten minutes."""
        if number is not None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, [json.loads(line) for line in errors.splitlines()]


@pytest.fixture
def daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    made = Daemon(tmp_path, request.param)
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.mark.parametrize(("daemon"), ["waits"], indirect=True)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_ends_the_daemon_cleanly(daemon: Daemon, number: signal.Signals, code: int) -> None:
    daemon.wait_until_running()
    returned, log = daemon.end(number)
    assert returned == code
    assert f"{number.name}: ending" in [entry["message"] for entry in log]
    assert all("exception" not in entry and entry["level"] == "info" for entry in log)


@pytest.mark.parametrize("daemon", ["slow to start", "slow destructor"], indirect=True)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_ends_the_daemon_before_the_event_loop_runs(daemon: Daemon, number: signal.Signals, code: int) -> None:
    daemon.wait_until_running()
    returned, log = daemon.end(number)
    assert (returned, log) == (code, [])


@pytest.mark.parametrize("daemon", ["waits", "slow to start"], indirect=True)
def test_sighup_reloads_certificates_and_keeps_running(daemon: Daemon) -> None:
    daemon.wait_until_running()
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("daemon", "says"),
    [("holds on", "_main (program.py:"), ("blocks", "the event loop is blocked by serve (program.py:")],
    indirect=["daemon"],
)
def test_blocking_code_is_named_and_ended(daemon: Daemon, says: str) -> None:
    daemon.wait_until_running()
    children = psutil.Process(daemon.process.pid).children()
    returned, log = daemon.end(signal.SIGTERM)
    assert returned == 1
    [told] = [entry["message"] for entry in log if "still not ended 0.5 s after being told to" in entry["message"]]
    assert says in told
    gone, left = psutil.wait_procs(children, timeout=30)
    assert not left
    assert len(gone) == len([entry for entry in log if "was left" in entry["message"]])


@pytest.mark.parametrize("daemon", ["drains"], indirect=True)
def test_sigterm_lets_a_draining_program_finish(daemon: Daemon) -> None:
    daemon.wait_until_running()
    daemon.begin_drain()
    assert daemon.process.stdout is not None
    assert daemon.process.stdout.readline() == "drained\n"
    returned, log = daemon.end()
    assert returned == 0
    assert [entry["level"] for entry in log] == ["info"] * len(log)


@pytest.mark.parametrize("daemon", ["drains for ever"], indirect=True)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_second_signal_ends_a_draining_program_at_once(daemon: Daemon, number: signal.Signals, code: int) -> None:
    daemon.wait_until_running()
    daemon.begin_drain()
    returned, log = daemon.end(number)
    assert returned == code
    assert f"{number.name}: ending" in [entry["message"] for entry in log]


@pytest.mark.parametrize("daemon", ["drains"], indirect=True)
def test_sigint_ends_a_program_without_a_drain(daemon: Daemon) -> None:
    daemon.wait_until_running()
    returned, log = daemon.end(signal.SIGINT)
    assert returned == 130
    assert not [entry for entry in log if "drain" in entry["message"]]


@pytest.mark.parametrize("daemon", ["drains too long"], indirect=True)
def test_drain_that_does_not_end_in_its_time_is_forced_to(daemon: Daemon) -> None:
    daemon.wait_until_running()
    returned, log = daemon.end(signal.SIGTERM)
    assert returned == 1
    assert [entry for entry in log if "still not ended 1.5 s after being told to" in entry["message"]]


@pytest.mark.parametrize(
    ("daemon", "traceback"), [("known", False), ("os", False), ("surprise", True)], indirect=["daemon"]
)
def test_failure_exits_with_code_1_and_its_message(daemon: Daemon, traceback: bool) -> None:
    returned, log = daemon.end()
    assert returned == 1
    assert "words of the failure" in log[-1]["message"]
    assert ("exception" in log[-1]) is traceback


@pytest.mark.parametrize("daemon", ["done"], indirect=True)
def test_finished_program_exits_with_code_0(daemon: Daemon) -> None:
    assert daemon.end()[0] == 0


async def test_health_follows_the_readiness_of_the_program() -> None:
    network = MemoryNetwork()
    async with network.endpoint("node") as node, network.endpoint("asking") as asking:
        readiness = Readiness()
        serve_health(node, readiness, role="worker", version="0.1.0")
        health = await call(asking, node.peer_id, HEALTH_CHECK, HealthRequest())
        assert (health.healthy, health.reason, health.role) == (False, "starting", "worker")
        readiness.ready()
        health = await call(asking, node.peer_id, HEALTH_CHECK, HealthRequest())
        assert (health.healthy, health.reason, health.version) == (True, None, "0.1.0")
        assert health.bytes_sent is not None
        readiness.waiting("no gateway")
        health = await call(asking, node.peer_id, HEALTH_CHECK, HealthRequest())
        assert (health.healthy, health.reason) == (False, "no gateway")


CODE = """
import logging, resource, sys
from hypha_net.node.descriptors import raise_descriptor_limit
logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
raise_descriptor_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard"), [(64, 1024), (90, 90), (64, 500)])
def test_the_soft_limit_becomes_the_hard_one_with_a_warning_if_that_is_low(soft: int, hard: int) -> None:
    command = [sys.executable, "-c", CODE, str(soft), str(hard)]
    *told, limit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert int(limit) == hard
    warning = f"this process may have {hard} files and connections open (ulimit -n); allow 1024 or more, or peers and "
    assert told == ([] if hard == 1024 else [f"{warning}tasks may have to wait"])
