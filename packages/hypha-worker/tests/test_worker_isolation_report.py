"""What an owner is told about isolation: ``probe``, the start's log line, and refusals; and jobs without layers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hypha_net.testing import MemoryNetwork
from hypha_worker.cli import main as command
from hypha_worker.errors import IsolationError
from hypha_worker.executors.isolation.assessment import Findings, assess, check_required, describe_probe, summarize
from hypha_worker.executors.isolation.layers import Finding
from hypha_worker.service import open_worker

MISSING = "bwrap is not installed: install the package bubblewrap"
FEATURES = {"cgroup": ("memory", "pids", "cpu"), "landlock": ("tcp", "signals")}


def findings(*working: str, without: str | None = None) -> Findings:
    """Return findings of a system on which some layers work, but one feature of theirs does not."""
    names = ("cgroup", "own-uid", "rlimits", "bubblewrap", "landlock", "supervisor")
    reasons = {"bubblewrap": MISSING}
    details = {name: f"detail of {name}" if name in working else reasons.get(name, "no") for name in names}
    features = {name: [each for each in FEATURES.get(name, ()) if each != without] for name in working}
    return {name: Finding(name in working, details[name], features.get(name, ())) for name in names}


def detail(aspect: str, findings: Findings) -> str:
    """Return the state of an aspect, and what the owner is told about it."""
    return next(f"{each.state}: {each.detail}" for each in assess(findings) if each.name == aspect)


def states(*working: str) -> dict[str, str]:
    return {aspect.name: aspect.state for aspect in assess(findings(*working))}


def test_with_all_layers_everything_is_contained() -> None:
    lines, _ = describe_probe(findings("cgroup", "own-uid", "rlimits", "bubblewrap"))
    assert len(lines) == 5
    assert set(states("cgroup", "own-uid", "rlimits", "bubblewrap").values()) == {"contained"}
    assert MISSING not in "\n".join(lines)


def test_without_bubblewrap_each_line_says_what_stays_open_and_how_to_mend_it() -> None:
    lines, _ = describe_probe(findings("rlimits", "landlock", "supervisor"))
    assert states("rlimits", "landlock", "supervisor") == dict.fromkeys(
        ("files", "processes", "network", "resources", "user"), "partly"
    )
    assert len(lines) == 5
    for line in lines[:3]:
        assert f"(bubblewrap: {MISSING})" in line


def test_an_old_kernel_s_landlock_is_not_said_to_hold_back_tcp() -> None:
    assert detail("network", findings("landlock")).startswith("partly: no TCP for executors with network = false")
    assert detail("network", findings("landlock", without="tcp")).startswith(
        "open: all of it, also for executors with network = false"
    )


@pytest.mark.parametrize("keeper", ["cgroup", "supervisor"])
def test_an_owner_learns_that_a_job_can_end_the_worker_where_signals_are_not_held_back(keeper: str) -> None:
    assert "the worker itself included" not in detail("processes", findings(keeper, "landlock"))
    for found in (findings(keeper, "landlock", without="signals"), findings(keeper)):
        assert detail("processes", found).startswith("partly: ")
        assert "can end those of the worker's user, the worker itself included" in detail("processes", found)


def test_limits_without_the_processor_s_controller_are_not_said_to_limit_its_time() -> None:
    assert detail("resources", findings("cgroup")).startswith("contained: ")
    assert detail("resources", findings("cgroup", without="cpu")).startswith(
        "partly: memory, processes and storage are limited to the lease; processor time is not"
    )


def test_without_any_layer_everything_is_open() -> None:
    assert set(states().values()) == {"open"}


def test_the_result_as_json_names_layers_and_aspects() -> None:
    _, found = describe_probe(findings("cgroup"))
    value = json.loads(json.dumps(found))
    assert value["layers"]["cgroup"] == {"works": True, "detail": "detail of cgroup"}
    assert value["layers"]["bubblewrap"] == {"works": False, "detail": MISSING}
    assert value["aspects"]["resources"]["state"] == "contained"
    assert value["aspects"]["resources"]["layer"] == "cgroup"
    assert value["aspects"]["files"]["layer"] is None


def test_a_required_layer_that_does_not_work_is_refused_with_reason_and_remedy() -> None:
    check_required(findings("cgroup"), ["cgroup"])
    with pytest.raises(IsolationError) as refused:
        check_required(findings("cgroup"), ["cgroup", "bubblewrap"])
    assert str(refused.value) == (
        f"isolation.require: the layer bubblewrap does not work here: {MISSING}. Mend this, or remove "
        '"bubblewrap" from [isolation] require'
    )


def test_the_start_s_line_tells_whether_there_is_a_sandbox() -> None:
    assert summarize(findings("cgroup", "bubblewrap")) == (True, "jobs are isolated by cgroup, bubblewrap")
    is_sandboxed, text = summarize(findings("cgroup"))
    assert not is_sandboxed
    assert text.startswith(f"jobs are isolated by cgroup only, not by bubblewrap: {MISSING}")


InLab = Callable[..., Any]
LAYERS = ["cgroup", "bubblewrap", "own-uid", "landlock", "supervisor", "rlimits"]
WITHOUT_SANDBOX = {"disable": ["bubblewrap", "own-uid"]}


@pytest.mark.usefixtures("cgroups")
@pytest.mark.parametrize("isolation", [{}, WITHOUT_SANDBOX], ids=["sandbox", "without"])
async def test_twice_the_memory_of_a_lease_ends_the_job_and_is_named(in_lab: InLab, isolation: dict[str, Any]) -> None:
    async with in_lab(isolation=isolation) as lab:
        await lab.start("x = bytearray(400_000_000); time.sleep(60)", cpu=1.0, memory=0.2)
        assert "used more memory than the 0.2 GB of its lease (memory): request more" in await lab.scheduler.failure()


async def test_jobs_run_without_any_layer(in_lab: InLab, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with in_lab(isolation={"disable": LAYERS}) as lab:
            await lab.start("print(1)")
            assert (await lab.scheduler.ended()).outcome == "finished"
    assert "jobs are isolated by nothing only, not by bubblewrap: disabled" in caplog.text


async def test_a_worker_without_a_required_layer_does_not_start(tmp_path: Path, make_config: Any) -> None:
    isolation = {"require": ["rlimits", "no-such"], "disable": ["rlimits"]}
    with pytest.raises(ValueError, match="isolation"):
        make_config(tmp_path, isolation=isolation)
    config = make_config(tmp_path, isolation={"require": ["landlock", "bubblewrap"]})  # one replaces the other
    async with MemoryNetwork().endpoint("worker") as endpoint:
        with pytest.raises(IsolationError, match=r"the layer (landlock|bubblewrap) does not work here: \w"):
            async with open_worker(config, endpoint):
                raise AssertionError("it started")


def test_probe_without_an_address_tells_the_owner_in_five_lines() -> None:
    done = CliRunner().invoke(command, ["probe"])
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "files",
        "processes",
        "network",
        "resources",
        "user",
    ]
    value = json.loads(CliRunner().invoke(command, ["probe", "--format", "json"]).stdout)
    assert set(value["layers"]) == set(LAYERS)
