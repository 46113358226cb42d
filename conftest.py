"""Fixtures and hooks for every test of the repository."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import settings

PROCESSES = 4
"""Tests that run at once with ``-n auto``, as pytest.ini has it; most of them wait for something."""

# the same examples in every run, and no test fails because the machine is slow
settings.register_profile("hypha", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("hypha")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for ``-n auto``; xdist does not ask under ``--pdb`` and starts none."""
    return int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", PROCESSES))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a failed test of real processes run once more; pytest-rerunfailures does so, but refuses ``--pdb``."""
    for item in items:
        if item.get_closest_marker("processes") is None:
            continue
        if not item.get_closest_marker("gate") and not item.get_closest_marker("nightly"):
            raise pytest.UsageError(f"{item.nodeid}: an everyday test is not repeated; mark it gate or nightly as well")
        if not config.getoption("usepdb"):
            item.add_marker(pytest.mark.flaky(reruns=1))
            # a timeout of the whole test would bound both attempts together; starting a network has bounds of its own
            timeout = item.get_closest_marker("timeout")
            seconds = timeout.args[0] if timeout else config.getini("timeout")
            item.add_marker(pytest.mark.timeout(seconds, func_only=True))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an ``async def`` test under trio, with the mark `virtual_clock` as `hypha_net.testing.simulate` does.

    The parameter `seed` of such a test also seeds the order of its tasks.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    test = partial(
        pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    )
    if pyfuncitem.get_closest_marker("virtual_clock") is None:
        anyio.run(test, backend="trio")
    else:
        from hypha_net.testing import simulate  # not needed by every test

        simulate(test, seed=pyfuncitem.funcargs.get("seed", 0))
    return True


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the repeated tests printed when they failed, and their number and names."""
    repeated = terminalreporter.getreports("rerun")
    for report in repeated:
        terminalreporter.section(f"failed, then repeated: {report.nodeid}", "-")
        terminalreporter.write_line(report.longreprtext)
        for name, text in report.sections:
            terminalreporter.write_line(f"--- {name}\n{text}")
    names = sorted({report.nodeid for report in repeated})
    terminalreporter.write_line(" ".join((f"repeated: {len(names)}", *names)))


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore the root logger after tests that run a command in this process, because later tests may read warnings."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(autouse=True)
def restore_environment() -> Iterator[None]:
    """Restore the environment, which child processes of later tests inherit."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def recorded() -> Iterator[Any]:
    """Record the spans and metrics of a test."""
    from support.telemetry import recording  # imports OpenTelemetry

    with recording() as telemetry:
        yield telemetry


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make reports transferable between processes even if a test logged invalid UTF-8."""
    report = yield
    report.sections = [(name, text.encode(errors="replace").decode()) for name, text in report.sections]
    return report
