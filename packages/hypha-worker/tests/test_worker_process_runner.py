"""The end of an executor's process, in the words of the layers that confine it."""

from __future__ import annotations

import errno
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hypha_proto.resources import Resources
from hypha_worker.errors import ExecutionError, ExecutorExitError
from hypha_worker.executors.isolation.layers import Confinement, Finding, Launch
from hypha_worker.executors.isolation.stack import IsolationStack
from hypha_worker.executors.process.process_runner import ProcessPlace, ProcessRunner
from hypha_worker.executors.runtimes import ExecutorSettings, HostSettings
from hypha_worker.leasing.capacity import Allocation
from hypha_worker.logs.run_log import LogFolder


class LimitingLayer:
    """A layer that knows why a run ended only until the run is cleaned up, as the kernel's counters of a cgroup."""

    name = "limiting"

    def __init__(self) -> None:
        self._exists = False

    def probe(self) -> Finding:
        return Finding(True, "limits")

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[LimitingLayer]:
        self._exists = True
        yield self
        self._exists = False

    def apply(self, launch: Launch) -> None:
        pass

    def pids(self) -> Sequence[int] | None:
        return None

    def kill(self) -> bool:
        return False

    def describe_end(self, exit_code: int) -> str | None:
        return "was ended because it used more memory than its lease has" if self._exists else None

    def sweep(self) -> None:
        pass


def run(settings: ExecutorSettings, folder: Path, *layers: LimitingLayer) -> None:
    """Run an executor in a folder."""
    host = HostSettings(
        folder, has_devices=False, logs=LogFolder(folder, max_size=1 << 20, keep=1), stack=IsolationStack(layers)
    )

    async def main() -> None:
        allocation, scope = Allocation(Resources(cpu=1.0)), anyio.CancelScope()
        place = ProcessPlace(folder, allocation, storage=1 << 20, scope=scope, log_name="run")
        values = {"{SOCKET_PATH}": str(folder / "bridge.sock"), "{WORK_DIR}": str(folder)}
        with anyio.fail_after(20):
            await ProcessRunner(settings, host, place).run(values)

    anyio.run(main, backend="trio")


def test_the_reason_of_the_layer_that_ended_a_process_is_reported(tmp_path: Path) -> None:
    settings = ExecutorSettings(sys.executable, ("-I", "-S", "-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(ExecutionError, match="was ended because it used more memory than its lease has"):
        run(settings, tmp_path, LimitingLayer())


@pytest.mark.parametrize(
    ("end", "is_failed_start"),
    [
        ("sys.exit(1)", True),
        ("sys.exit(127)", True),
        ("sys.exit(2)", False),
        ("sys.exit(75)", False),
        ("sys.exit(137)", False),
        ("os.kill(os.getpid(), 9)", False),
    ],
)
def test_ends_that_may_be_a_failed_start(tmp_path: Path, end: str, is_failed_start: bool) -> None:
    settings = ExecutorSettings(cmd=sys.executable, args=("-I", "-S", "-c", f"import os, sys; {end}"))
    with pytest.raises(ExecutionError) as found:
        run(settings, tmp_path)
    assert isinstance(found.value, ExecutorExitError) == is_failed_start


def test_an_exit_that_a_layer_explains_is_no_failed_start(tmp_path: Path) -> None:
    settings = ExecutorSettings(cmd=sys.executable, args=("-I", "-S", "-c", "import sys; sys.exit(1)"))
    with pytest.raises(ExecutorExitError):
        run(settings, tmp_path)
    with pytest.raises(ExecutionError, match="more memory") as found:
        run(settings, tmp_path, LimitingLayer())
    assert not isinstance(found.value, ExecutorExitError)


KILL_ITSELF = "import os, sys; open(sys.argv[1], 'a').write(sys.argv[2]); os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("counted", "reason"),
    [("oom_kill 8\n", "was ended by SIGKILL, while this machine ended .* no memory left"), ("", "by SIGKILL$")],
)
def test_memory_is_named_if_the_kernel_has_ended_processes_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: str, reason: str
) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 5\n" if counted else "oom_kill 7\n")
    monkeypatch.setattr("hypha_worker.executors.process.process_runner._VMSTAT", counters)
    args = ("-I", "-S", "-c", KILL_ITSELF, str(counters), counted)
    with pytest.raises(ExecutionError, match=reason):
        run(ExecutorSettings(cmd=sys.executable, args=args), tmp_path)


def test_a_writable_folder_that_cannot_be_created_is_named_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    settings = ExecutorSettings(cmd=sys.executable, writable=(file / "cache",))
    with pytest.raises(ExecutionError, match=r"executors\.writable: .*/file/cache cannot be created: Not a directory;"):
        run(settings, tmp_path)


class FullLayer(LimitingLayer):
    """Cannot be prepared."""

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[LimitingLayer]:
        """Fail as a full file system does."""
        raise OSError(errno.ENOSPC, "No space left on device")
        yield


def test_a_layer_that_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match=r"the layer .* cannot be prepared: .*No space left on device"):
        run(ExecutorSettings(sys.executable), tmp_path, FullLayer())
