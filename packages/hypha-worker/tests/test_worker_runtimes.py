"""The table of runtimes: what a configuration may name, and what a new runtime consists of."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import anyio
import pytest

from hypha_proto.commands import CommandAnswer, SetWorkers, TaskCommand
from hypha_proto.offers import ExecutorDescriptor
from hypha_worker.executors.runtimes import RUNTIMES, ExecutorSection, find_runtime
from hypha_worker.tasks.execution import Execution, TaskContext

LEAN = """
import sys
import hypha_worker.config
loaded = {name for name in sys.modules if name.startswith("hypha_worker.executors.") and ".isolation" not in name}
assert loaded == {"hypha_worker.executors.runtimes"}, loaded
hypha_worker.config.ExecutorSection.model_validate({"class": "train", "name": "x", "cmd": "y"})
heavy = {"uvicorn", "fastapi", "numpy", "hypha_worker.bridge", "hypha_worker.tasks"} & set(sys.modules)
assert not heavy, heavy
"""


def test_every_runtime_of_the_table_is_found() -> None:
    kinds = ("train", "aggregate", "x")
    suited = {name: [kind for kind in kinds if find_runtime(name).suits(kind)] for name in RUNTIMES}
    assert suited == {"process": ["train", "x"], "parameter-server": ["aggregate"]}


def test_a_configuration_imports_only_the_table_and_then_its_own_runtimes() -> None:
    subprocess.run([sys.executable, "-c", LEAN], check=True, timeout=60)


class EchoExecution(Execution):
    """Takes commands and ends after the first one."""

    def __init__(self, _context: TaskContext) -> None:
        self._heard = anyio.Event()

    async def run(self) -> None:
        await self._heard.wait()

    def handle_command(self, command: TaskCommand) -> CommandAnswer:
        self._heard.set()
        return CommandAnswer(number=command.number, accepted=True)


class EchoRuntime:
    """A runtime as a further folder of `executors` would define it."""

    def suits(self, kind: str) -> bool:
        return kind == "aggregate"

    def check(self, settings: ExecutorSection) -> None:
        pass

    def make_factory(self, _settings: ExecutorSection, _host: object) -> Any:
        return EchoExecution

    async def find_fault(self, settings: Any, host: Any, work_dir: Path) -> str | None:
        return None

    def preload(self) -> None:
        pass


@pytest.fixture
def echo_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("hypha_worker.executors.echo.runtime")
    module.RUNTIME = EchoRuntime()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(RUNTIMES, "echo", "answers")


@pytest.mark.usefixtures("echo_runtime")
async def test_a_runtime_is_a_folder_and_a_row(in_lab: Any) -> None:
    async with in_lab(executors=[{"class": "aggregate", "name": "parameter-server", "runtime": "echo"}]) as lab:
        spec = lab.aggregate_spec([], [])
        lease = await lab.scheduler.hire(ExecutorDescriptor("aggregate", "parameter-server"))
        await lab.scheduler.dispatch(lease, spec)
        task = lab.scheduler.task_on(lease)
        assert (await lab.scheduler.tasks.command(lease, task, SetWorkers(workers=()))).accepted
        assert (await lab.scheduler.ended()).outcome == "finished"
