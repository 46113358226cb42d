"""What an owner is told about isolation: five lines of ``probe``, the start's log line, and refusals."""

from __future__ import annotations

import json

import pytest

from hypha_worker.errors import IsolationError
from hypha_worker.executors.isolation.assessment import (
    Findings,
    IsolationExamination,
    assess,
    check_required,
    summarize,
)
from hypha_worker.executors.isolation.layers import Finding

MISSING = "bwrap is not installed: install the package bubblewrap"
FEATURES = {"cgroup": ("memory", "pids", "cpu"), "landlock": ("tcp", "signals")}


def findings(*working: str, without: str | None = None) -> Findings:
    """Return findings of a system on which some layers work, but one feature of theirs does not."""
    names = ("cgroup", "own-uid", "rlimits", "bubblewrap", "landlock", "supervisor")
    reasons = {"bubblewrap": MISSING}
    details = {name: f"detail of {name}" if name in working else reasons.get(name, "no") for name in names}
    features = {name: [each for each in FEATURES.get(name, ()) if each != without] for name in working}
    return [(name, Finding(name in working, details[name], features.get(name, ()))) for name in names]


def detail(aspect: str, findings: Findings) -> str:
    """Return the state of an aspect, and what the owner is told about it."""
    return next(f"{each.state}: {each.detail}" for each in assess(findings) if each.name == aspect)


def states(*working: str) -> dict[str, str]:
    return {aspect.name: aspect.state for aspect in assess(findings(*working))}


def test_with_all_layers_everything_is_contained() -> None:
    examination = IsolationExamination(findings("cgroup", "own-uid", "rlimits", "bubblewrap"))
    assert len(examination.lines) == 5
    assert set(states("cgroup", "own-uid", "rlimits", "bubblewrap").values()) == {"contained"}
    assert MISSING not in "\n".join(examination.lines)


def test_without_bubblewrap_each_line_says_what_stays_open_and_how_to_mend_it() -> None:
    examination = IsolationExamination(findings("rlimits", "landlock", "supervisor"))
    assert states("rlimits", "landlock", "supervisor") == dict.fromkeys(
        ("files", "processes", "network", "resources", "user"), "partly"
    )
    assert len(examination.lines) == 5
    for line in examination.lines[:3]:
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
    value = json.loads(json.dumps(IsolationExamination(findings("cgroup")).value))
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
