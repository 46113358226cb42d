"""The table of runtimes: what a configuration may name, and what a new runtime consists of."""

from __future__ import annotations

import subprocess
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from hypha_net import rpc
from hypha_net.errors import UnsupportedProtocolError
from hypha_proto.ids import PeerId
from hypha_proto.offers import AggregateExecutor
from hypha_proto.round_membership import ROUND_MEMBERS, MembersKnown, RoundMembers
from hypha_worker.executors.runtimes import RUNTIMES, ExecutorSettings, RuntimeEntry, check_executor, find_runtime
from hypha_worker.jobs.execution import ExecutionTrace, JobContext, TaskMethod

LEAN = """
import sys
import hypha_worker.config
loaded = {name for name in sys.modules if name.startswith("hypha_worker.executors.") and ".isolation" not in name}
assert loaded == {"hypha_worker.executors.runtimes"}, loaded
hypha_worker.config.ExecutorSection.model_validate({"class": "train", "name": "x", "cmd": "y"})
heavy = {"uvicorn", "fastapi", "numpy", "hypha_worker.bridge", "hypha_worker.jobs"} & set(sys.modules)
assert not heavy, heavy
"""


def test_every_runtime_of_the_table_is_found() -> None:
    assert {name: find_runtime(name).job_class for name in RUNTIMES} == {
        "process": "train",
        "parameter-server": "aggregate",
    }


def test_an_unknown_runtime_is_refused_with_the_known_ones(make_config: Any, tmp_path: Path) -> None:
    executor = {"class": "train", "name": "x", "runtime": "prozess", "cmd": "y"}
    with pytest.raises(ValueError, match="no such runtime; there are parameter-server, process"):
        make_config(tmp_path, executors=[executor])


@pytest.mark.parametrize(
    ("name", "job_class", "settings", "told"),
    [
        ("process", "train", ExecutorSettings(), "cmd is missing"),
        ("parameter-server", "aggregate", ExecutorSettings(args=("x",)), "cmd and args"),
        ("process", "aggregate", ExecutorSettings("x"), 'set runtime = "parameter-server"'),
        ("parameter-server", "train", ExecutorSettings(), 'set runtime = "process"'),
        ("parameter-server", "inference", ExecutorSettings(), 'of class "aggregate": set runtime = "process"'),
        ("process", "inference", ExecutorSettings(), "cmd is missing"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name: str, job_class: Any, settings: ExecutorSettings, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_executor(name, job_class, settings)


def test_a_configuration_imports_only_the_table_and_then_its_own_runtimes() -> None:
    subprocess.run([sys.executable, "-c", LEAN], check=True, timeout=60)


class EchoExecution:
    """Handles the scheduler's requests and ends after the first one."""

    senders: ClassVar[frozenset[PeerId]] = frozenset()
    accepted_push_kind = ""
    trace = ExecutionTrace(last_lines=("heard",))

    def __init__(self, _context: JobContext) -> None:
        self._heard = anyio.Event()
        self.message_handlers = {ROUND_MEMBERS.name: self._hear}

    async def run(self) -> None:
        await self._heard.wait()

    async def _hear(self, _scheduler: PeerId, _message: RoundMembers) -> MembersKnown:
        self._heard.set()
        return MembersKnown(accepted=True)


class EchoRuntime:
    """A runtime as a further folder of `executors` would define it."""

    job_class = "aggregate"
    runs_tasks = False
    task_methods = (TaskMethod(ROUND_MEMBERS, lambda reason: MembersKnown(accepted=False, reason=reason)),)

    def check(self, settings: ExecutorSettings) -> None:
        pass

    def make_factory(self, _settings: ExecutorSettings, _host: object) -> Any:
        return EchoExecution

    def preload(self) -> None:
        pass


@pytest.fixture
def echo_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("hypha_worker.executors.echo.runtime")
    module.RUNTIME = EchoRuntime()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(RUNTIMES, "echo", RuntimeEntry("echo", "answers"))


@pytest.mark.usefixtures("echo_runtime")
def test_a_runtime_is_a_folder_and_a_row(in_lab: Callable[..., None]) -> None:
    async def case(lab: Any) -> None:
        spec = lab.aggregate_spec([], [])
        lease = await lab.scheduler.hire(AggregateExecutor(name="parameter-server"))
        await lab.scheduler.dispatch(lab.peer, lease, spec)
        message = RoundMembers(job_id=spec.job_id, round=1, members=(), deadline_ms=1)
        assert (await rpc.call(lab.scheduler.endpoint, lab.peer, ROUND_MEMBERS, message)).accepted
        end = await lab.scheduler.ended()
        assert (end.outcome, end.last_lines) == ("finished", ("heard",))

    in_lab(case, executors=[{"class": "aggregate", "name": "parameter-server", "runtime": "echo"}])


def test_a_worker_without_a_parameter_server_does_not_speak_its_protocol(in_lab: Callable[..., None]) -> None:
    async def case(lab: Any) -> None:
        message = RoundMembers(job_id=uuid.uuid4(), round=1, members=(), deadline_ms=1)
        with pytest.raises(UnsupportedProtocolError):
            await rpc.call(lab.scheduler.endpoint, lab.peer, ROUND_MEMBERS, message)

    in_lab(case, executors=[{"class": "train", "name": "x", "cmd": "y"}])
