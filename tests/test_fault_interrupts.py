"""Interrupting the demo at any moment: it reports it, exits with the signal's status, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_network import processes_of
from support.waiting import wait_until

from hypha_local.processes import child_environment, script

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(400)]

ENDS_WITHIN = 90.0
"""Seconds for seven programs to shut down in order, while other tests run."""


class Demo:
    """The demo as a child process in its own session, as on a terminal."""

    def __init__(self, folder: Path) -> None:
        """Start the demo."""
        self.folder = folder
        self.said = folder.with_suffix(".stderr")
        command = [script("hypha-local"), "demo", "--workers", "2", "--rounds", "4", "--dir", str(folder)]
        with self.said.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, env=child_environment(os.environ)
            )

    def wait_for(self, text: str) -> None:
        """Wait until it has printed `text`."""

        def happened() -> bool:
            assert self.process.poll() is None, self.said.read_text()
            return text in self.said.read_text()

        wait_until(happened, 150, f"the demo saying {text!r}")

    def interrupt(self, number: signal.Signals) -> None:
        """Send a signal to the demo alone."""
        self.process.send_signal(number)

    def assert_ended_by(self, number: signal.Signals) -> None:
        """Assert that it exits in time with the signal's status and leaves only its logs."""
        status = self.process.wait(ENDS_WITHIN)
        said = self.said.read_text()
        assert processes_of(self.folder) == []
        assert status == 128 + number, said
        assert "Traceback" not in said
        for log in (self.folder / "logs").glob("*.log"):
            assert "Traceback" not in log.read_text(), f"{log.name}: {log.read_text()}"

    def kill(self) -> None:
        """Kill it if a test has failed before its exit."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path / "run")
    yield demo
    demo.kill()


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "certificates"),
        (signal.SIGTERM, "nodes up and healthy"),
        (signal.SIGINT, "scheduler started"),
        (signal.SIGTERM, "placement:"),
        (signal.SIGINT, "round 1/"),
        (signal.SIGHUP, "round 2/"),
        (signal.SIGTERM, "round 4/4"),
    ],
)
def test_an_interrupted_demo_leaves_nothing_running(demo: Demo, number: signal.Signals, moment: str) -> None:
    demo.wait_for(moment)
    demo.interrupt(number)
    demo.assert_ended_by(number)
    assert f"{number.name}: ending every process" in demo.said.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_has_just_started_is_interrupted(demo: Demo, number: signal.Signals) -> None:
    wait_until(demo.folder.exists, 60, "the run directory")
    demo.interrupt(number)
    demo.assert_ended_by(number)


def test_a_second_signal_leaves_nothing_running_either(demo: Demo) -> None:
    demo.wait_for("round 1/")
    demo.interrupt(signal.SIGINT)
    demo.wait_for("SIGINT: ending every process")
    demo.interrupt(signal.SIGINT)
    demo.interrupt(signal.SIGTERM)
    demo.assert_ended_by(signal.SIGINT)
