"""The weights of a job on disk: rounds, restore after a crash between any two steps, checkpoints, and the result."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from support.waiting import run

from hypha_proto.file_digests import digest_directory, digest_file
from hypha_proto.global_model import MOMENTUM, WEIGHTS, GlobalModel, RoundState
from hypha_proto.job_spec import Nesterov
from hypha_proto.safetensors_io import Array, TensorFile, TensorFileWriter, TensorInfo, from_float
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_proto.weights_digest import digest_weights
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import write_result
from hypha_scheduler.strategies.diloco.checkpoints import Evaluations, WeightsQuality
from hypha_scheduler.strategies.diloco.result_model import START_MODEL, UPDATES, ResultModel, UpdateFileError

OUTER = Nesterov(learning_rate=0.7, momentum=0.9)


def make_job(directory: Path, dtype: str = "F32", value: float = 1.0) -> Path:
    """Create a job's directory with a start model of three equal numbers."""
    start = directory / START_MODEL
    start.mkdir(parents=True)
    (directory / UPDATES).mkdir()
    (start / "config.json").write_text('{"of": "model"}')
    (start / "tokenizer.json").write_text("of the model")
    with TensorFileWriter(start / "model.safetensors", {"w": TensorInfo(dtype, (3,))}, {}) as writer:
        writer.write("w", np.full(3, value, np.float32))
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_job(tmp_path / "job")


def update(directory: Path, number: int, name: str = "w", value: float | None = None) -> Path:
    """Write an outer update that adds the round's number, or `value`."""
    path = directory / UPDATES / f"round-{number}-ab12.safetensors"
    added = np.full(3, number if value is None else value, np.float32)
    write_update(path, {name: (3,)}, [(name, added)], UpdateMetadata(round=number))
    return path


def weights(path: Path | None) -> list[float]:
    assert path is not None
    with TensorFile(path) as file:
        values: list[float] = file.tensor("w").tolist()
        return values


async def take(result: ResultModel, number: int) -> RoundState:
    """Advance and commit a round."""
    advance = await result.advance(update(result.directory, number), number)
    await result.commit(number)
    await result.write_checkpoint()
    return advance


def entries(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


async def test_rounds_follow_each_other_and_only_the_last_state_stays(directory: Path) -> None:
    before = digest_directory(directory / START_MODEL)

    result = ResultModel(directory, OUTER)
    assert (result.weights_file(), result.momentum_file()) == (None, None)
    first = await result.advance(update(directory, 1), 1)
    assert (result.round, result.weights, result.weights_file()) == (0, None, None)
    again = await result.advance(update(directory, 1), 1)
    assert again == first
    await result.commit(1)
    assert (result.round, result.weights) == (1, first.weights)
    assert weights(result.weights_file()) == [2.0] * 3
    with pytest.raises(ValueError, match="round 1 does not follow round 1"):
        await result.advance(update(directory, 1), 1)
    with pytest.raises(ValueError, match="round 3 does not follow round 1"):
        await result.advance(update(directory, 3), 3)
    second = await take(result, 2)
    assert (second.before, result.weights) == (first.weights, second.weights)
    assert weights(result.weights_file()) == [4.0] * 3
    await result.finish()
    assert weights(directory / "model" / "model.safetensors") == [4.0] * 3
    assert digest_directory(directory / START_MODEL) == before
    state = {f"outer-state/round-2/{name}" for name in (WEIGHTS, MOMENTUM, "state.json")}
    model = {f"{folder}/{name}" for folder in ("model", START_MODEL) for name in os.listdir(directory / START_MODEL)}
    assert entries(directory) == {*state, *model, f"{UPDATES}/round-3-ab12.safetensors"}


NUMBERED = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
OWN = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
THREE = {"id2label": {str(number): f"LABEL_{number}" for number in range(3)}}
NAMED = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, NAMED),  # two classes, which transformers does not write
        ({"num_labels": 2}, {"num_labels": 2} | NAMED),
        (NUMBERED, NAMED),
        (OWN, OWN),
        (THREE, THREE),
        ({"num_labels": 3}, {"num_labels": 3}),
    ],
    ids=str,
)
async def test_models_get_the_names_of_the_classes_of_the_data(
    config: dict[str, Any], expected: dict[str, Any], directory: Path
) -> None:
    (directory / START_MODEL / "config.json").write_text(json.dumps({"model_type": "bert"} | config))

    result = ResultModel(directory, OUTER, checkpoint_every=1, class_names=("bad", "good"))
    await take(result, 1)
    await result.finish()
    for folder in (directory / "model", directory / "checkpoints" / "round-1"):
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "bert"} | expected


async def test_a_round_can_be_advanced_while_the_one_before_is_about_to_be_committed(directory: Path) -> None:
    result = ResultModel(directory, OUTER)
    await result.advance(update(directory, 1), 1)
    second = await result.advance(update(directory, 2), 2)
    await result.commit(1)
    await result.commit(2)
    assert (result.round, result.weights) == (2, second.weights)
    assert weights(result.weights_file()) == [4.0] * 3


async def test_an_outer_update_that_came_twice_is_deleted(directory: Path) -> None:
    result = ResultModel(directory, OUTER, keep_updates=True)
    await take(result, 1)
    doubled = update(directory, 1).rename(directory / UPDATES / "round-1-cd34.safetensors")
    for _ in range(2):  # it may be gone
        await result.discard(doubled)
    assert not doubled.exists()
    assert weights(result.weights_file()) == [2.0] * 3


async def test_outer_updates_that_were_used_are_kept_if_wanted(directory: Path) -> None:
    result = ResultModel(directory, OUTER, keep_updates=True)
    update(directory, 1).rename(directory / UPDATES / "round-1-cd34.safetensors")  # is not used
    advances = [await take(result, number) for number in (1, 2)]
    for number, advance in enumerate(advances, 1):
        assert digest_file(directory / UPDATES / f"round-{number}.safetensors") == advance.update
    assert sorted(os.listdir(directory / UPDATES)) == ["round-1.safetensors", "round-2.safetensors"]


@pytest.mark.parametrize(("name", "value"), [("stranger", 1.0), ("w", float("nan")), ("w", float("-inf"))])
async def test_an_update_that_cannot_be_used_leaves_the_round_open(directory: Path, name: str, value: float) -> None:
    result = ResultModel(directory, OUTER)
    with pytest.raises(UpdateFileError, match="the outer update of round 1 cannot be used"):
        await result.advance(update(directory, 1, name, value), 1)
    await take(result, 1)
    assert weights(result.weights_file()) == [2.0] * 3


async def test_the_result_has_the_files_that_were_trained_with(directory: Path) -> None:
    preprocessor = directory / "preprocessor"
    preprocessor.mkdir()
    for name in ("config.json", "tokenizer.json", "vocab.txt"):
        (preprocessor / name).write_text("of the preprocessor")

    result = ResultModel(directory, OUTER, preprocessor=preprocessor)
    await take(result, 1)
    await result.finish()
    found = {path.name: path.read_text() for path in (directory / "model").iterdir() if path.suffix != ".safetensors"}
    preprocessed = dict.fromkeys(("tokenizer.json", "vocab.txt"), "of the preprocessor")
    assert found == {"config.json": '{"of": "model"}', **preprocessed}


async def test_the_result_is_synced_before_the_summary_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr("os.fsync", lambda fd: kept.append(os.fstat(fd).st_ino))

    result = ResultModel(directory, OUTER)
    await result.advance(update(directory, 1), 1)
    state = directory / "outer-state" / "round-1"
    on_disk = {path.stat().st_ino for path in (*state.iterdir(), state, state.parent, directory)}
    assert on_disk <= set(kept), "the state of a round is on disk before it is recorded"
    await result.commit(1)
    await result.finish()
    write_result(directory / "result.json", {"rounds": 1})
    model = directory / "model"
    wanted = (model / "model.safetensors", model / "config.json", model, directory / "result.json", directory)
    assert {path.stat().st_ino for path in wanted} <= set(kept)


def test_an_update_is_refused_for_want_of_room_or_of_the_directory(directory: Path, tmp_path: Path) -> None:
    result = ResultModel(directory, OUTER)
    assert result.lacks_room(1) is None
    lacking = result.lacks_room(1 << 62)
    assert str(lacking).startswith(f"{directory}: ")
    assert f"an outer update has {1 << 62} bytes" in str(lacking)
    gone = ResultModel(tmp_path / "gone", OUTER).lacks_room(1)
    assert f"No such file or directory: '{tmp_path / 'gone'}'" in str(gone)


# ------------------------------------------------------------------------------------------------------- faulty disks


class KilledError(BaseException):
    """The program was killed."""


class FaultyDisk:
    """Counts operations on files; the one numbered `at` fails, and with `dies` all that follow."""

    def __init__(self, at: int, error: BaseException, dies: bool) -> None:
        """Take the error of the failing operation."""
        self.at = at
        self.error = error
        self.dies = dies
        self.count = 0

    def step(self) -> None:
        self.count += 1
        if self.count == self.at or (self.dies and self.count > self.at):
            raise self.error

    def wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return operation(*args, **kwargs)

        return failing


OPERATIONS = ("mkdir", "rmdir", "unlink", "replace", "rename", "fsync")


@contextmanager
def faulty(disk: FaultyDisk, *operations: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in operations:
            patch.setattr(os, name, disk.wrap(getattr(os, name)))
        patch.setattr(TensorFileWriter, "write_stored", disk.wrap(TensorFileWriter.write_stored))
        patch.setattr(Path, "write_text", disk.wrap(Path.write_text))
        yield


def killed_at(directory: Path, at: int, keep: bool) -> tuple[int, dict[int, RoundState], bool]:
    """Take rounds until operation `at`, at which the program is killed.

    Returns:
        The last round whose record is on disk, what each advance gave, and whether the program was killed.
    """
    recorded, advances = 0, dict[int, RoundState]()
    disk = FaultyDisk(at, KilledError(), dies=True)

    async def case() -> None:
        nonlocal recorded
        result = ResultModel(directory, OUTER, keep_updates=keep, checkpoint_every=2)
        for number in (1, 2, 3):
            path = update(directory, number)
            with faulty(disk, *OPERATIONS):
                advances[number] = await result.advance(path, number)
                recorded = number
                await result.commit(number)
                await result.write_checkpoint()
        with faulty(disk, *OPERATIONS):
            await result.finish()

    try:
        run(case)
    except KilledError:
        return recorded, advances, True
    return recorded, advances, False


@pytest.mark.parametrize("keep", [False, True])
def test_a_crash_between_any_two_steps_leaves_the_last_recorded_round(
    tmp_path: Path, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    whole = make_job(tmp_path / "whole")
    _, expected, _ = killed_at(whole, 1 << 30, keep)
    at, killed, seen = 0, True, set[int]()
    while killed:
        at += 1
        directory = make_job(tmp_path / str(at))
        recorded, advances, killed = killed_at(directory, at, keep)
        assert advances == {number: expected[number] for number in advances}
        seen.add(recorded)

        async def go_on(directory: Path = directory, recorded: int = recorded, is_done: bool = not killed) -> None:
            result = ResultModel(directory, OUTER, keep_updates=keep, checkpoint_every=2)
            result.restore(recorded, expected[recorded].weights if recorded else None)
            first = 1 if keep else recorded + is_done
            kept = [f"round-{number}.safetensors" for number in range(max(1, first), recorded + 1)]
            assert sorted(os.listdir(directory / UPDATES)) == kept
            state = directory / "outer-state"
            if state.exists():
                assert os.listdir(state) == ([f"round-{recorded}"] if recorded else [])
            for number in range(recorded + 1, 4):
                assert await take(result, number) == expected[number]
            await result.finish()

        run(go_on)
        for name in ("model", "outer-state", "checkpoints/round-2", UPDATES):
            assert digest_directory(directory / name) == digest_directory(whole / name), (at, name)
    assert seen == {0, 1, 2, 3}
    assert at > 60


def test_a_full_disk_leaves_nothing_of_a_round_which_can_be_repeated(tmp_path: Path) -> None:
    faults = list[OSError]()

    async def case(directory: Path, at: int) -> None:
        result = ResultModel(directory, OUTER)
        first = await take(result, 1)
        path, before = update(directory, 2), entries(directory)
        disk = FaultyDisk(at, OSError(errno.ENOSPC, "No space left on device"), dies=False)
        with faulty(disk, "mkdir", "replace", "rename", "fsync"):
            try:
                await result.advance(path, 2)
            except OSError as error:
                faults.append(error)
        if len(faults) == at:
            assert entries(directory) == before
            assert (result.round, result.weights) == (1, first.weights)
            await result.advance(path, 2)
        await result.commit(2)
        assert weights(result.weights_file()) == [4.0] * 3

    at = 0
    while at == len(faults):
        at += 1
        directory = make_job(tmp_path / str(at))
        run(partial(case, directory, at))
    assert at > 8
    assert {error.errno for error in faults} == {errno.ENOSPC}
    assert all(str(tmp_path / str(number)) in str(error) for number, error in enumerate(faults, 1))


# ------------------------------------------------------------------------------------------------------------- restore


async def interrupted(directory: Path) -> RoundState:
    result = ResultModel(directory, OUTER)
    await take(result, 1)
    return await take(result, 2)


@pytest.mark.parametrize("name", [WEIGHTS, MOMENTUM, "state.json"])
async def test_a_damaged_or_missing_state_is_refused_by_name(directory: Path, name: str) -> None:
    last = await interrupted(directory)
    path = directory / "outer-state" / "round-2" / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(JobFailedError, match=rf"outer-state: the job cannot go on: .*{name}"):
        ResultModel(directory, OUTER).restore(2, last.weights)
    path.unlink()
    with pytest.raises(JobFailedError, match=rf"round-2/{name}: the file is missing"):
        ResultModel(directory, OUTER).restore(2, last.weights)
    with pytest.raises(JobFailedError, match=r"round-3: the directory is missing"):
        ResultModel(directory, OUTER).restore(3, last.weights)


async def test_state_of_other_weights_than_recorded_is_refused(directory: Path) -> None:
    await interrupted(directory)
    with pytest.raises(JobFailedError, match=r"the journal records blake3:0000.* for round 2"):
        ResultModel(directory, OUTER).restore(2, f"blake3:{'0' * 64}")


async def test_a_new_job_drops_what_an_earlier_run_has_left(directory: Path) -> None:
    await interrupted(directory)
    result = ResultModel(directory, OUTER)
    result.restore(0, None)
    await take(result, 1)
    assert weights(result.weights_file()) == [2.0] * 3


@pytest.mark.parametrize("keep", [False, True])
def test_a_commit_that_fails_can_be_repeated(tmp_path: Path, keep: bool) -> None:
    failed, at = True, 0

    async def case(directory: Path, disk: FaultyDisk) -> None:
        result = ResultModel(directory, OUTER, keep_updates=keep)
        await take(result, 1)
        advance = await result.advance(update(directory, 2), 2)
        try:
            with faulty(disk, *OPERATIONS):
                await result.commit(2)
        except OSError:
            await result.commit(2)
        assert (result.round, result.weights) == (2, advance.weights)
        assert os.listdir(directory / "outer-state") == ["round-2"]
        kept = ["round-1.safetensors", "round-2.safetensors"] if keep else ["round-2.safetensors"]
        assert sorted(os.listdir(directory / UPDATES)) == kept

    while failed:
        at += 1
        disk = FaultyDisk(at, OSError(errno.EIO, "Input/output error"), dies=False)
        run(partial(case, make_job(tmp_path / str(at)), disk))
        failed = disk.count >= disk.at
    assert at > 4


ROUNDS = 40


def stored(path: Path) -> Array:
    with TensorFile(path) as file:
        return np.array(file.stored("w"))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
async def test_many_small_updates_give_the_rounding_of_the_workers_weights(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(3)
    folder = tmp_path / START_MODEL
    folder.mkdir()
    with TensorFileWriter(folder / "model.safetensors", {"w": TensorInfo(dtype, (3000,))}) as writer:
        writer.write("w", rng.normal(0, 0.5, 3000).astype("f4"))
    with TensorFile(folder / "model.safetensors") as file:
        start = file.tensor("w")
    worker = start.copy()

    result = ResultModel(tmp_path, OUTER)
    for number in range(1, ROUNDS + 1):
        change = rng.normal(1e-4, 1e-5, worker.shape).astype("f4")
        before, worker = worker, worker + change
        write_update(tmp_path / "u", {"w": (3000,)}, [("w", change)], UpdateMetadata(round=number))
        advance = await result.advance(tmp_path / "u", number)
        assert (advance.before, advance.weights) == (
            digest_weights([("w", before)]),
            digest_weights([("w", worker)]),
        )
        await result.commit(number)
        assert (result.round, result.weights) == (number, advance.weights)
    weights = result.weights_file()
    assert weights is not None
    np.testing.assert_array_equal(stored(weights), worker)
    await result.finish()
    assert abs(float(np.mean(worker - start)) - ROUNDS * 1e-4) < 1e-5
    np.testing.assert_array_equal(stored(tmp_path / "model" / "model.safetensors"), from_float(worker, dtype))


@pytest.fixture
def zeros(tmp_path: Path) -> Path:
    return make_job(tmp_path / "job", "BF16", 0.0)


@pytest.fixture
def result(zeros: Path) -> ResultModel:
    """Return the model of a job that writes a checkpoint and evaluates after each round."""
    return ResultModel(zeros, OUTER, checkpoint_every=1, evaluate_every=1)


async def advance(result: ResultModel, number: int) -> None:
    await result.advance(update(result.directory, number, value=1.0), number)


async def take_checkpoint(result: ResultModel, number: int) -> Path | None:
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


async def test_a_checkpoint_is_a_loadable_model_of_its_round(zeros: Path) -> None:
    result = ResultModel(zeros, OUTER, checkpoint_every=2)
    written = [await take_checkpoint(result, number) for number in range(1, 6)]
    folder = zeros / "checkpoints"
    assert written == [None, folder / "round-2", None, folder / "round-4", None]
    assert checkpoints(zeros) == ["index.json", "round-4"], "without evaluation the last one is kept"
    assert sorted(os.listdir(folder / "round-4")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert weight(folder / "round-4") == 4.0
    await result.finish()
    last = {"round": 4, "directory": "round-4"}
    assert result.summary() == {"model_dir": str(zeros / "model"), "checkpoints": {"last": last, "best": None}}
    assert weight(zeros / "model") == 5.0


async def test_without_evaluation_the_last_good_one_is_kept_until_the_end(zeros: Path) -> None:
    result = ResultModel(zeros, OUTER, checkpoint_every=1)
    for number in range(1, 6):
        await take_checkpoint(result, number)
        result.note_good(min(number, 3))
    assert checkpoints(zeros) == ["index.json", "round-3", "round-5"]
    assert result.good_checkpoint() == zeros / "checkpoints" / "round-3"
    again = ResultModel(zeros, OUTER, checkpoint_every=1)
    again.note_good(3)
    again.restore(5, result.weights)
    assert checkpoints(zeros) == ["index.json", "round-3", "round-5"]
    await again.finish()
    assert checkpoints(zeros) == ["index.json", "round-5"]


async def test_the_last_and_the_best_are_kept(result: ResultModel, zeros: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 1.5, 4: 2.0, 5: 1.75, 6: 1.25}
    seen = {}
    for number, loss in losses.items():
        await take_checkpoint(result, number)
        seen[number] = checkpoints(zeros)
        result.evaluated(number, loss, 0.5, 10)
    await result.finish()
    found = result.summary()["checkpoints"]
    best = {"round": 2, "directory": "round-2", "loss": 1.0, "accuracy": 0.5, "samples": 10}
    assert found == {"last": {**best, "round": 6, "directory": "round-6", "loss": 1.25}, "best": best}
    assert found == {key: index(zeros)[key] for key in ("last", "best")}
    assert seen[6] == ["index.json", "round-2", "round-5", "round-6"], "that of round 5 may still be better"
    assert checkpoints(zeros) == ["index.json", "round-2", "round-6"]
    assert weight(zeros / "checkpoints" / "round-2") == 2.0


async def test_the_best_has_both_an_evaluation_and_a_checkpoint(zeros: Path) -> None:
    losses = {3: 0.1, 6: 1.0, 9: 0.2, 12: 2.0}
    result = ResultModel(zeros, OUTER, checkpoint_every=2, evaluate_every=3)
    for number in range(1, 15):
        await take_checkpoint(result, number)
        if number in losses:
            result.evaluated(number, losses[number], None, 10)
    await result.finish()
    assert index(zeros)["best"] == {
        "round": 6,
        "directory": "round-6",
        "loss": 1.0,
        "accuracy": None,
        "samples": 10,
    }
    assert checkpoints(zeros) == ["index.json", "round-14", "round-6"]


async def test_a_share_that_comes_late_still_decides(result: ResultModel, zeros: Path) -> None:
    await take_checkpoint(result, 1)
    result.evaluated(1, 1.0, None, 10)
    await take_checkpoint(result, 2)
    result.evaluated(2, 0.5, None, 10)
    await take_checkpoint(result, 3)
    result.evaluated(2, 9.5, None, 10)
    result.evaluated(3, 4.0, None, 20)
    await result.finish()
    assert index(zeros)["best"]["round"] == 1
    assert checkpoints(zeros) == ["index.json", "round-1", "round-3"]


async def test_checkpoints_that_nobody_evaluates_do_not_pile_up(result: ResultModel, zeros: Path) -> None:
    for number in range(1, 9):
        await take_checkpoint(result, number)
    assert checkpoints(zeros) == ["index.json", "round-7", "round-8"]


@pytest.mark.parametrize(
    ("number", "loss", "samples"), [(1, math.nan, 1), (1, 0.0, 0), (1, 0.0, math.nan), (1, 0.0, 1e300), (9, 0.0, 1)]
)
async def test_an_evaluation_that_makes_no_sense_is_ignored(
    result: ResultModel, zeros: Path, number: int, loss: float, samples: float, caplog: pytest.LogCaptureFixture
) -> None:
    await take_checkpoint(result, 1)
    result.evaluated(number, loss, None, samples)
    await result.finish()
    assert index(zeros)["best"] is None
    assert f"ignoring an evaluation of round {number}" in caplog.text


async def test_rounds_go_on_while_a_checkpoint_is_written(zeros: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, begun, go_on, written = GlobalModel.write_model, Event(), Event(), list[int]()

    def slow(model: GlobalModel, number: int, target: Path) -> None:
        written.append(number)
        begun.set()
        assert go_on.wait(20)
        write(model, number, target)

    monkeypatch.setattr(GlobalModel, "write_model", slow)
    result = ResultModel(zeros, OUTER, checkpoint_every=2)
    await take_checkpoint(result, 1)
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
    assert os.listdir(zeros / "outer-state") == ["round-7"]
    assert weight(zeros / "checkpoints" / "round-6") == 6.0


async def test_results_that_arrive_while_the_index_is_written_count(
    result: ResultModel, zeros: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Evaluations.record

    def interrupted(found: Evaluations) -> dict[str, Any]:
        before = dict(found._results)
        result.evaluated(1, 3.0, None, 10)
        assert found._results == before, "they do not change what is being written"
        return record(found)

    await take_checkpoint(result, 1)
    result.evaluated(1, 1.0, None, 10)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluations, "record", interrupted)
        await take_checkpoint(result, 2)
    await result.finish()
    assert index(zeros)["evaluations"]["1"] == {"loss": 2.0, "accuracy": None, "samples": 20}


async def test_a_checkpoint_for_which_there_is_no_room_is_left_out(
    zeros: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    result = ResultModel(zeros, OUTER, checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(GlobalModel, "write_model", full)
        assert await take_checkpoint(result, 1) is None
    assert os.listdir(zeros / "checkpoints") == []
    assert await take_checkpoint(result, 2) == zeros / "checkpoints" / "round-2"
    assert "the checkpoint of round 1 could not be written: [Errno 28] No space left on device" in caplog.text


async def test_a_resumed_job_keeps_its_checkpoints_and_evaluations(result: ResultModel, zeros: Path) -> None:
    for number in (1, 2, 3, 4):
        await take_checkpoint(result, number)
        result.evaluated(number, float(number), None, 10)
    recorded, weights = result.round, result.weights
    (zeros / "checkpoints" / "round-5").mkdir()
    (zeros / "checkpoints" / ".round-6.part").mkdir()
    resumed = ResultModel(zeros, OUTER, checkpoint_every=1, evaluate_every=1)
    resumed.restore(recorded, weights)
    assert checkpoints(zeros) == ["index.json", "round-1", "round-3", "round-4"]
    await take_checkpoint(resumed, 5)
    resumed.evaluated(5, 5.0, None, 10)
    await resumed.finish()
    assert checkpoints(zeros) == ["index.json", "round-1", "round-5"]


async def test_a_malformed_index_costs_the_evaluations_alone(
    result: ResultModel, zeros: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await take_checkpoint(result, 1)
    (zeros / "checkpoints" / "index.json").write_text('{"evaluations": {"1": {"loss": "low"}}}')
    ResultModel(zeros, OUTER, checkpoint_every=1, evaluate_every=1).restore(1, result.weights)
    assert checkpoints(zeros) == ["index.json", "round-1"]
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
