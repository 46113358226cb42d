"""Shows the workers and datasets that a scheduler knows, for the command ``nodes``. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Final

from hypha_proto.ids import describe_peer
from hypha_proto.resources import RESOURCE_UNITS
from hypha_scheduler.submission.job_view import readable_seconds
from hypha_scheduler.submission.log_client import escape_controls, is_meant

_RECENT: Final = 2.0
"""Seconds for which a worker counts as seen now."""

Nodes = Mapping[str, Sequence[Mapping[str, Any]]]
"""The answer to ``nodes``: `workers` and `datasets`."""


def _shown(worker: Mapping[str, Any]) -> str:
    return describe_peer(worker["peer"], worker.get("name"))


def find_named(nodes: Nodes, name: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return the workers and datasets that a name means, without a kind of which there are none."""
    found = {
        "workers": [each for each in nodes["workers"] if is_meant(name, each["peer"], _shown(each))],
        "datasets": [each for each in nodes["datasets"] if each["name"] == name],
    }
    return {kind: entries for kind, entries in found.items() if entries}


def nearest_name(nodes: Nodes, name: str) -> str:
    """Return the end of the error about a name that nothing has: the nearest one."""
    known = {str(each.get("name") or _shown(each)) for each in (*nodes["workers"], *nodes["datasets"])}
    return f"; the nearest is {nearest(name, known, 1)[0]!r}" if known else "; none are known"


def nearest(wanted: str, names: Collection[str], count: int) -> list[str]:
    """Return `count` of `names` at most, those that are most similar to `wanted` first."""
    folded = {name.casefold(): name for name in sorted(names)}
    return [folded[name] for name in get_close_matches(wanted.casefold(), folded, count, cutoff=0.0)]


def render_nodes(nodes: Nodes, now: float) -> str:
    """Return lines for people, in 80 columns where names are short; `now` is the time since the epoch."""
    return "".join(f"{escape_controls(line)}\n" for line in _lines(nodes, now))


def _lines(nodes: Nodes, now: float) -> Iterator[str]:
    for kind, lines_of in (("workers", partial(_worker_lines, now=now)), ("datasets", _dataset_lines)):
        if kind in nodes:
            yield f"{kind}:" if nodes[kind] else f"{kind}: none"
            for entry in nodes[kind]:
                yield from lines_of(entry)


def _dataset_lines(dataset: Mapping[str, Any]) -> Iterator[str]:
    differ = f", {dataset['manifests']} different manifests" if dataset["manifests"] > 1 else ""
    yield f"  {dataset['name']}  {dataset['num_slices']} slices, data nodes: {dataset['providers']}{differ}"


def _worker_lines(worker: Mapping[str, Any], now: float) -> Iterator[str]:
    ago = now - worker["seen"]
    seen = "now" if ago < _RECENT else f"{readable_seconds(ago)} ago"
    known = "" if worker.get("price") is None else f", price {worker['price']:g}/h, running tasks: {worker['tasks']}"
    yield f"  {_shown(worker)}  seen {seen}{known}"
    if (total := worker.get("total")) is not None:
        amounts = [
            f"{name} {worker['free'][name]:.4g} of {total[name]:.4g} {unit}"
            for name, unit in RESOURCE_UNITS.items()
            if total[name]
        ]
        yield f"    free: {', '.join(amounts) or 'nothing'}"
        yield f"    executors: {', '.join(worker.get('executors', ())) or 'none'}"
    if reasons := worker.get("reasons"):
        yield f"    no offers: {'; '.join(reasons)}"
