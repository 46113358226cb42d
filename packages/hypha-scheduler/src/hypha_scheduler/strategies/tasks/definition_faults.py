"""Faults between the tasks of a job: names, results that nobody makes, cycles. Pure; reads what a user wrote.

The tasks need not be valid by themselves: whatever is wrong with one of them is reported by its own model, and what
cannot be read is skipped here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, cast

from pydantic import BaseModel
from pydantic_core import InitErrorDetails, PydanticCustomError

Place = tuple[str | int, ...]

_MAX_CYCLES: Final = 20
"""Cycles that are reported at once; each takes a search through all tasks."""


def _fault(place: Place, reason: str) -> InitErrorDetails:
    """Return a fault at keys and indices below the list of tasks; its reason ends with the remedy."""
    return InitErrorDetails(type=PydanticCustomError("task_graph", cast(Any, reason)), loc=place, input=None)


@dataclass(slots=True)
class _Outline:
    """What other tasks may refer to."""

    name: str
    index: int
    outputs: frozenset[str]
    results: list[tuple[int, Any, Any]] = field(default_factory=list)
    """Index of the resource, task and output of each."""


def find_faults(tasks: object, limit: int) -> list[InitErrorDetails]:
    """Return what is wrong between tasks, in their order.

    Args:
        tasks: list of task objects, unchecked.
        limit: largest number of instances.
    """
    if not isinstance(tasks, Sequence) or isinstance(tasks, str | bytes):
        return []
    entries = [entry.model_dump(exclude_none=True) if isinstance(entry, BaseModel) else entry for entry in tasks]
    outlines = [found for index, entry in enumerate(entries) if (found := _outline(index, entry)) is not None]
    by_name: dict[str, _Outline] = {}
    for outline in outlines:
        by_name.setdefault(outline.name, outline)
    return [
        *_duplicates(outlines, by_name),
        *_unknown_results(outlines, by_name),
        *_cycles(by_name),
        *_too_many(entries, limit),
    ]


def _outline(index: int, entry: Any) -> _Outline | None:
    if not isinstance(entry, Mapping) or not isinstance(name := entry.get("name"), str):
        return None
    outputs = entry.get("outputs")
    found = _Outline(name, index, frozenset(outputs if isinstance(outputs, Mapping) else ()))
    resources = entry.get("resources")
    for number, resource in enumerate(resources if isinstance(resources, list | tuple) else ()):
        source = resource.get("result") if isinstance(resource, Mapping) else None
        if isinstance(source, Mapping):
            found.results.append((number, source.get("task"), source.get("output")))
    return found


def _duplicates(outlines: list[_Outline], by_name: dict[str, _Outline]) -> Iterator[InitErrorDetails]:
    for outline in outlines:
        first = by_name[outline.name]
        if first is not outline:
            reason = f"is the name of tasks[{first.index}], too; give each task a name of its own"
            yield _fault((outline.index, "name"), reason)


def _unknown_results(outlines: list[_Outline], by_name: dict[str, _Outline]) -> Iterator[InitErrorDetails]:
    for outline in outlines:
        for number, task, output in outline.results:
            place: Place = (outline.index, "resources", number, "result")
            if not isinstance(task, str):
                continue
            if (maker := by_name.get(task)) is None:
                yield _fault((*place, "task"), f"is not a task of this job; {_suggest(task, by_name)}")
            elif isinstance(output, str) and output not in maker.outputs:
                hint = _suggest(output, maker.outputs)
                yield _fault((*place, "output"), f"is not an output of task {task!r}; {hint}")


def _suggest(name: str, known: Mapping[str, object] | frozenset[str]) -> str:
    if close := difflib.get_close_matches(name, list(known)[:200], n=1):
        return f"did you mean {close[0]!r}?"
    if not known:
        return "it has no outputs; add it to them"
    shown = sorted(known)[:10]
    return f"known: {', '.join(shown)}{', …' if len(known) > len(shown) else ''}"


def _too_many(entries: list[Any], limit: int) -> Iterator[InitErrorDetails]:
    counts = (entry.get("count", 1) if isinstance(entry, Mapping) else 1 for entry in entries)
    total = sum(count for count in counts if isinstance(count, int) and 0 < count <= limit)
    if total > limit:
        yield _fault((), f"{total} instances of tasks are over the limit of {limit}; divide the job into several")


def _cycles(by_name: dict[str, _Outline]) -> Iterator[InitErrorDetails]:
    """Yield a fault for each of up to `_MAX_CYCLES` cycles that have no task in common."""
    makers = {
        name: {task: number for number, task, _ in reversed(outline.results) if isinstance(task, str)}
        for name, outline in by_name.items()
    }
    for _ in range(_MAX_CYCLES):
        try:
            TopologicalSorter(makers).prepare()
        except CycleError as error:
            first, *rest = error.args[1][::-1]  # each uses a result of the next; the last is the first again
            last = rest[-2] if len(rest) > 1 else first
            place = (by_name[last].index, "resources", makers[last][first], "result", "task")
            yield _fault(place, _describe_cycle([first, *rest[:-1]]))
            for name in rest:
                makers[name] = {}
        else:
            return


def _describe_cycle(cycle: list[str]) -> str:
    shown = cycle if len(cycle) <= 20 else [*cycle[:10], "…", *cycle[-9:]]
    names = " → ".join((*shown, cycle[0]))
    if len(cycle) == 1:
        return f"the task uses its own result ({names}); remove this resource"
    return f"these tasks wait for each other ({names}, each uses the next one's result); remove one of these resources"
