"""What holds for every test of the repository."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator

import pytest

PROCESSES = 2
"""Tests that run at once with ``-n auto``, as pytest.ini has it; most of them wait for something."""


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for ``-n auto``; xdist does not ask under ``--pdb`` and starts none."""
    return int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", PROCESSES))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a test that runs a command in this process did to the root logger: the next one may read warnings."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """Undo what such a test did to the environment, which processes of later tests inherit."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let reports pass between processes also when a test logged what is no UTF-8."""
    report = yield
    report.sections = [(name, text.encode(errors="replace").decode()) for name, text in report.sections]
    return report
