"""What the layers that work on a machine hold back, in words for its owner; and the check of those that are required.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hypha_worker.errors import IsolationError
from hypha_worker.executors.isolation.layers import Finding

Findings = Mapping[str, Finding]
"""By the name of the layer."""
State = Literal["contained", "partly", "open"]


@dataclass(frozen=True, slots=True)
class Aspect:
    """One thing that a job could do to the machine."""

    name: str
    state: State
    layer: str | None
    """The layer that contains it, or None."""
    detail: str
    """What a job can and cannot do; where it is not contained, also why the best layer does not work."""


@dataclass(frozen=True, slots=True)
class _Effect:
    layer: str
    state: State
    text: str
    feature: str | None = None
    """What a layer has to hold back, too (`Finding.features`), for this to be true."""


_SEES: Final = "it sees those of others"
_ENDS: Final = "it sees those of others and can end those of the worker's user, the worker itself included"
_ASPECTS: Final[Mapping[str, tuple[Sequence[_Effect], str]]] = {
    "files": (
        (
            _Effect("bubblewrap", "contained", "a job sees its own folder, its program and the system's, nothing else"),
            _Effect(
                "landlock",
                "partly",
                "a job opens its own folder, its program and the system's only; of other files it can still change the "
                "modes, and connect to those that are sockets",
            ),
        ),
        "a job reads and changes whatever the worker's user can, the worker's key and other jobs included",
    ),
    "processes": (
        (
            _Effect("bubblewrap", "contained", "a job sees its own processes only, and all of them end with it"),
            _Effect("cgroup", "partly", f"all processes of a job end with it; {_SEES}", "signals"),
            _Effect("supervisor", "partly", f"processes of a job end with it and with the worker; {_SEES}", "signals"),
            _Effect("cgroup", "partly", f"all processes of a job end with it; {_ENDS}"),
            _Effect("supervisor", "partly", f"processes of a job end with it and with the worker; {_ENDS}"),
        ),
        "a process that leaves its group and clears its environment outlives its job",
    ),
    "network": (
        (
            _Effect("bubblewrap", "contained", "none for executors with network = false; for others, all of it"),
            _Effect(
                "landlock", "partly", "no TCP for executors with network = false, but UDP; for others, all of it", "tcp"
            ),
        ),
        "all of it, also for executors with network = false",
    ),
    "resources": (
        (
            _Effect(
                "cgroup",
                "contained",
                "memory, processes, processor time and storage are limited to the lease; without "
                "[resources.default], a lease that states no memory has no limit of it",
                "cpu",
            ),
            _Effect(
                "cgroup", "partly", "memory, processes and storage are limited to the lease; processor time is not"
            ),
            _Effect("rlimits", "partly", "storage is limited to the lease; memory and processor time are not"),
        ),
        "storage is watched; a job can use all memory and processors",
    ),
    "user": (
        (
            _Effect("own-uid", "contained", "each lease has a user of its own, without privileges"),
            _Effect("bubblewrap", "contained", "the worker's user, without privileges and without its files"),
            _Effect("landlock", "partly", "the worker's user, without privileges to gain"),
        ),
        "the worker's user, with all of its privileges",
    ),
}


def assess(findings: Findings) -> Sequence[Aspect]:
    """Return what is contained and what stays open, five aspects."""
    return [_assess(name, effects, otherwise, findings) for name, (effects, otherwise) in _ASPECTS.items()]


def _assess(name: str, effects: Sequence[_Effect], otherwise: str, findings: Findings) -> Aspect:
    works = {layer for layer, finding in findings.items() if finding.works}
    features = {None, *(feature for layer in works for feature in findings[layer].features)}
    working = next((each for each in effects if each.layer in works and each.feature in features), None)
    found = (
        Aspect(name, working.state, working.layer, working.text) if working else Aspect(name, "open", None, otherwise)
    )
    best = effects[0].layer
    if found.state == "contained" or best not in findings:
        return found
    return Aspect(name, found.state, found.layer, f"{found.detail} ({best}: {findings[best].detail})")


def describe_probe(findings: Findings) -> tuple[Sequence[str], dict[str, Any]]:
    """Return what ``probe`` without an address prints: a line for each aspect; and the same with the findings."""
    aspects = assess(findings)
    lines = [f"{each.name:<10} {each.state:<10} {each.detail}" for each in aspects]
    told = {each.name: {"state": each.state, "layer": each.layer, "detail": each.detail} for each in aspects}
    layers = {name: {"works": finding.works, "detail": finding.detail} for name, finding in findings.items()}
    return lines, {"aspects": told, "layers": layers}


def check_required(findings: Findings, required: Iterable[str]) -> None:
    """Check that the layers that the owner requires work.

    Raises:
        IsolationError: one does not; the message names it, the reason and the remedy.
    """
    for name in required:
        finding = findings.get(name, Finding(False, "it does not exist on this system"))
        if not finding.works:
            raise IsolationError(
                f"isolation.require: the layer {name} does not work here: {finding.detail}. Mend this, or remove "
                f'"{name}" from [isolation] require'
            )


def summarize(findings: Findings) -> tuple[bool, str]:
    """Return whether jobs are in a sandbox, and one line about the layers that work."""
    working = ", ".join(name for name, finding in findings.items() if finding.works) or "nothing"
    sandbox = findings.get("bubblewrap", Finding(False, "it does not exist on this system"))
    if sandbox.works:
        return True, f"jobs are isolated by {working}"
    return False, (
        f"jobs are isolated by {working} only, not by bubblewrap: {sandbox.detail}; "
        "hypha-worker probe tells what stays open"
    )
