"""Task graph: tasks wait for inputs, run, and end once."""

from __future__ import annotations

import uuid

import pytest

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import TaskState
from hypha_scheduler.strategies.diloco.dependency_graph import DependencyGraph, TaskError, TaskOfLease

PEER = PeerId.from_public_key(bytes(32))


def task(name: str, number: int, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> TaskOfLease:
    return TaskOfLease(name, "train", PEER, uuid.UUID(int=number), frozenset(inputs), frozenset(outputs))


def graph_of(*tasks: TaskOfLease) -> DependencyGraph:
    graph = DependencyGraph()
    for found in tasks:
        graph.add(found)
    return graph


def names(tasks: tuple[TaskOfLease, ...]) -> list[str]:
    return [found.name for found in tasks]


def test_task_is_ready_when_its_inputs_exist() -> None:
    graph = graph_of(task("train", 1, ("model", "server")), task("aggregate", 2, ("model",), ("server",)))
    assert names(graph.ready()) == []
    graph.provide("model")
    assert names(graph.ready()) == ["aggregate"]
    with pytest.raises(TaskError, match="cannot start"):
        graph.start("train")
    graph.start("aggregate")
    assert names(graph.ready()) == ["train"]


def test_first_final_state_counts() -> None:
    graph = graph_of(task("a", 1))
    graph.start("a")
    assert graph.end("a", TaskState.FAILED)
    assert not graph.end("a", TaskState.FINISHED)
    assert names(graph.running()) == []
    with pytest.raises(TaskError, match="not an ending"):
        graph.end("a", TaskState.RUNNING)


def test_task_is_found_by_its_lease() -> None:
    graph = graph_of(task("a", 1), task("b", 2))
    found = graph.of_lease(uuid.UUID(int=2))
    assert found is not None
    assert found.name == "b"
    assert graph.of_lease(uuid.UUID(int=3)) is None


def test_lease_takes_a_further_task_when_the_first_has_ended() -> None:
    graph = graph_of(task("a", 1))
    graph.start("a")
    with pytest.raises(TaskError, match="one name or one lease"):
        graph.add(task("a.1", 1))
    graph.end("a", TaskState.FAILED)
    graph.add(task("a.1", 1))
    found = graph.of_lease(uuid.UUID(int=1))
    assert found is not None
    assert found.name == "a.1"
    assert names(graph.ready()) == ["a.1"]


def test_task_waits_while_an_input_exists_no_more() -> None:
    graph = graph_of(task("aggregate", 1, (), ("server",)))
    graph.start("aggregate")
    graph.withdraw("server")
    graph.add(task("train", 2, ("server",)))
    assert names(graph.ready()) == []
    graph.provide("server")
    assert names(graph.ready()) == ["train"]
