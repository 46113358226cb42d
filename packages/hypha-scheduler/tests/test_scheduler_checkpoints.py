"""Checkpoints of a job: when they are written, which are kept, and which is best by evaluation."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from hypha_proto.global_model import GlobalModel
from hypha_proto.job_spec import Nesterov
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_scheduler.strategies.diloco.evaluations import Evaluations, WeightsQuality
from hypha_scheduler.strategies.diloco.result_model import START_MODEL, UPDATES, ResultModel

OUTER = Nesterov(learning_rate=0.7, momentum=0.9)


def make_job(directory: Path) -> Path:
    start = directory / START_MODEL
    start.mkdir(parents=True)
    (directory / UPDATES).mkdir()
    for name in ("config.json", "tokenizer.json"):
        (start / name).write_text("{}")
    with TensorFileWriter(start / "model.safetensors", {"w": TensorInfo("BF16", (3,))}, {}) as writer:
        writer.write("w", np.zeros(3, np.float32))
    return directory


async def advance(result: ResultModel, number: int) -> None:
    path = result.directory / UPDATES / f"round-{number}-ab12.safetensors"
    write_update(path, {"w": (3,)}, [("w", np.ones(3, np.float32))], UpdateMetadata(round=number))
    await result.advance(path, number)


async def take(result: ResultModel, number: int) -> Path | None:
    await advance(result, number)
    await result.commit(number)
    return await result.write_checkpoint()


def checkpoints(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "checkpoints"))


def index(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "checkpoints" / "index.json").read_bytes())
    return found


def weight(folder: Path) -> float:
    with TensorFile(folder / "model.safetensors") as file:
        assert file.tensors["w"].dtype == "BF16"
        return float(file.tensor("w")[0])


async def test_a_checkpoint_is_a_loadable_model_of_its_round(tmp_path: Path) -> None:
    directory = make_job(tmp_path / "job")
    result = ResultModel(directory, OUTER, checkpoint_every=2)
    written = [await take(result, number) for number in range(1, 6)]
    folder = directory / "checkpoints"
    assert written == [None, folder / "round-2", None, folder / "round-4", None]
    assert checkpoints(directory) == ["index.json", "round-4"], "without evaluation the last one is kept"
    assert sorted(os.listdir(folder / "round-4")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert weight(folder / "round-4") == 4.0
    await result.finish()
    last = {"round": 4, "directory": "round-4"}
    assert result.summary() == {"model_dir": str(directory / "model"), "checkpoints": {"last": last, "best": None}}
    assert weight(directory / "model") == 5.0


async def test_without_evaluation_the_last_good_one_is_kept_until_the_end(tmp_path: Path) -> None:
    directory = make_job(tmp_path / "job")
    result = ResultModel(directory, OUTER, checkpoint_every=1)
    for number in range(1, 6):
        await take(result, number)
        result.note_good(min(number, 3))
    assert checkpoints(directory) == ["index.json", "round-3", "round-5"]
    assert result.good_checkpoint() == directory / "checkpoints" / "round-3"
    again = ResultModel(directory, OUTER, checkpoint_every=1)
    again.note_good(3)
    again.restore(5, result.weights)
    assert checkpoints(directory) == ["index.json", "round-3", "round-5"]
    await again.finish()
    assert checkpoints(directory) == ["index.json", "round-5"]


async def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    directory = make_job(tmp_path / "job")
    losses = {1: 3.0, 2: 1.0, 3: 1.5, 4: 2.0, 5: 1.75, 6: 1.25}
    seen = {}
    result = ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1)
    for number, loss in losses.items():
        await take(result, number)
        seen[number] = checkpoints(directory)
        result.evaluated(number, loss, 0.5, 10)
    await result.finish()
    found = result.summary()["checkpoints"]
    best = {"round": 2, "directory": "round-2", "loss": 1.0, "accuracy": 0.5, "samples": 10}
    assert found == {"last": {**best, "round": 6, "directory": "round-6", "loss": 1.25}, "best": best}
    assert found == {key: index(directory)[key] for key in ("last", "best")}
    assert seen[6] == ["index.json", "round-2", "round-5", "round-6"], "that of round 5 may still be better"
    assert checkpoints(directory) == ["index.json", "round-2", "round-6"]
    assert weight(directory / "checkpoints" / "round-2") == 2.0


async def test_the_best_has_both_an_evaluation_and_a_checkpoint(tmp_path: Path) -> None:
    directory = make_job(tmp_path / "job")
    losses = {3: 0.1, 6: 1.0, 9: 0.2, 12: 2.0}
    result = ResultModel(directory, OUTER, checkpoint_every=2, evaluate_every=3)
    for number in range(1, 15):
        await take(result, number)
        if number in losses:
            result.evaluated(number, losses[number], None, 10)
    await result.finish()
    assert index(directory)["best"] == {
        "round": 6,
        "directory": "round-6",
        "loss": 1.0,
        "accuracy": None,
        "samples": 10,
    }
    assert checkpoints(directory) == ["index.json", "round-14", "round-6"]


async def test_a_share_that_comes_late_still_decides(tmp_path: Path) -> None:
    directory = make_job(tmp_path / "job")
    result = ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1)
    await take(result, 1)
    result.evaluated(1, 1.0, None, 10)
    await take(result, 2)
    result.evaluated(2, 0.5, None, 10)
    await take(result, 3)
    result.evaluated(2, 9.5, None, 10)
    result.evaluated(3, 4.0, None, 20)
    await result.finish()
    assert index(directory)["best"]["round"] == 1
    assert checkpoints(directory) == ["index.json", "round-1", "round-3"]


async def test_checkpoints_that_nobody_evaluates_do_not_pile_up(tmp_path: Path) -> None:
    directory = make_job(tmp_path / "job")
    result = ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1)
    for number in range(1, 9):
        await take(result, number)
    assert checkpoints(directory) == ["index.json", "round-7", "round-8"]


@pytest.mark.parametrize(
    ("number", "loss", "samples"), [(1, math.nan, 1), (1, 0.0, 0), (1, 0.0, math.nan), (1, 0.0, 1e300), (9, 0.0, 1)]
)
async def test_an_evaluation_that_makes_no_sense_is_ignored(
    tmp_path: Path, number: int, loss: float, samples: float, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_job(tmp_path / "job")
    result = ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1)
    await take(result, 1)
    result.evaluated(number, loss, None, samples)
    await result.finish()
    assert index(directory)["best"] is None
    assert f"ignoring an evaluation of round {number}" in caplog.text


async def test_rounds_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_job(tmp_path / "job")
    write, begun, go_on, written = GlobalModel.write_model, Event(), Event(), list[int]()

    def slow(model: GlobalModel, number: int, target: Path) -> None:
        written.append(number)
        begun.set()
        assert go_on.wait(20)
        write(model, number, target)

    monkeypatch.setattr(GlobalModel, "write_model", slow)
    result = ResultModel(directory, OUTER, checkpoint_every=2)
    await take(result, 1)
    await advance(result, 2)
    async with anyio.create_task_group() as tasks:
        await result.commit(2)
        tasks.start_soon(result.write_checkpoint)
        assert await anyio.to_thread.run_sync(begun.wait, 20)
        for number in range(3, 8):
            await advance(result, number)
            await result.commit(number)
            tasks.start_soon(result.write_checkpoint)
        assert result.round == 7, "no round waits for a checkpoint"
        go_on.set()
    assert written == [2, 6], "a checkpoint that is overtaken by the next is left out"
    assert os.listdir(directory / "outer-state") == ["round-7"]
    assert weight(directory / "checkpoints" / "round-6") == 6.0


async def test_results_that_arrive_while_the_index_is_written_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, record = make_job(tmp_path / "job"), Evaluations.record
    result = ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1)

    def interrupted(found: Evaluations) -> dict[str, Any]:
        before = dict(found._results)
        result.evaluated(1, 3.0, None, 10)
        assert found._results == before, "they do not change what is being written"
        return record(found)

    await take(result, 1)
    result.evaluated(1, 1.0, None, 10)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluations, "record", interrupted)
        await take(result, 2)
    await result.finish()
    assert index(directory)["evaluations"]["1"] == {"loss": 2.0, "accuracy": None, "samples": 20}


async def test_a_checkpoint_for_which_there_is_no_room_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_job(tmp_path / "job")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    result = ResultModel(directory, OUTER, checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(GlobalModel, "write_model", full)
        assert await take(result, 1) is None
    assert os.listdir(directory / "checkpoints") == []
    assert await take(result, 2) == directory / "checkpoints" / "round-2"
    assert "the checkpoint of round 1 could not be written: [Errno 28] No space left on device" in caplog.text


async def test_a_resumed_job_keeps_its_checkpoints_and_evaluations(tmp_path: Path) -> None:
    directory = make_job(tmp_path / "job")
    result = ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1)
    for number in (1, 2, 3, 4):
        await take(result, number)
        result.evaluated(number, float(number), None, 10)
    recorded, weights = result.round, result.weights
    (directory / "checkpoints" / "round-5").mkdir()
    (directory / "checkpoints" / ".round-6.part").mkdir()
    resumed = ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1)
    resumed.restore(recorded, weights)
    assert checkpoints(directory) == ["index.json", "round-1", "round-3", "round-4"]
    await take(resumed, 5)
    resumed.evaluated(5, 5.0, None, 10)
    await resumed.finish()
    assert checkpoints(directory) == ["index.json", "round-1", "round-5"]


async def test_a_malformed_index_costs_the_evaluations_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_job(tmp_path / "job")
    result = ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1)
    await take(result, 1)
    (directory / "checkpoints" / "index.json").write_text('{"evaluations": {"1": {"loss": "low"}}}')
    ResultModel(directory, OUTER, checkpoint_every=1, evaluate_every=1).restore(1, result.weights)
    assert checkpoints(directory) == ["index.json", "round-1"]
    assert "index.json is malformed, so earlier evaluations do not count" in caplog.text


def test_two_shares_of_an_evaluation_count_by_their_samples() -> None:
    found = Evaluations()
    found.add(1, 1.0, 0.5, 30)
    found.add(1, 2.0, 0.9, 10)
    assert found.of(1) == WeightsQuality(1.25, 0.6, 40)
    found.add(2, 1.0, None, 30)
    found.add(2, 1.4, 0.25, 10)
    assert found.of(2) == WeightsQuality(1.1, 0.25, 40)
    assert found.best([1, 2, 3]) == 2
    assert found.best([1, 3]) == 1
    assert found.best([3]) is None
    assert found.of(3) is None
