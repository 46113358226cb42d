"""Model files of a job: serving the start model, applying outer updates, writing the result."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Nesterov, PeersReference
from hypha_proto.transfer import PullRequest, Refusal
from hypha_proto.update_file import TensorFile, TensorFileWriter, TensorInfo, UpdateMetadata, write_update
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import open_preprocessor, open_start_model, write_result
from hypha_scheduler.jobs.config import ModelTable, PreprocessorTable
from hypha_scheduler.strategies.diloco.result_model import ResultModel

PEER = PeerId.from_public_key(bytes(32))
OUTER = Nesterov(learning_rate=0.7, momentum=0.9)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(20):
            await main()

    anyio.run(bounded, backend="trio")


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with TensorFileWriter(folder / "model.safetensors", {"w": TensorInfo("F32", (3,))}, {}) as writer:
        writer.write("w", np.ones(3, np.float32))
    return folder


def test_local_model_is_copied_and_its_files_are_served(tmp_path: Path) -> None:
    source = make_model(tmp_path / "start")

    async def case() -> None:
        model = ModelTable(path=source, type="vision-classification")
        job_id = uuid.UUID(int=5)
        start = await open_start_model(model, tmp_path / "copy", job_id, PEER)
        assert isinstance(start.reference, PeersReference)
        assert start.reference.filenames == ("config.json", "model.safetensors")
        found = start.resolve(PullRequest(dataset=f"{job_id}/model", index=1))
        assert isinstance(found, PullSource)
        assert found.source == source / "model.safetensors"
        assert isinstance(start.resolve(PullRequest(dataset=f"{job_id}/model", index=2)), Refusal)
        assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["config.json", "model.safetensors"]

    run(case)


def test_a_model_that_an_earlier_run_has_changed_is_copied_again(tmp_path: Path) -> None:
    source, copy = make_model(tmp_path / "start"), tmp_path / "copy"

    async def case() -> None:
        for _ in range(2):
            await open_start_model(ModelTable(path=source, type="vision-classification"), copy, uuid.UUID(int=5), PEER)
            assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
            (copy / "model.safetensors").write_bytes(b"trained")

    run(case)


def test_local_preprocessor_is_copied_and_its_files_are_served(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.md"):
        (source / name).write_text("{}")

    async def case() -> None:
        job_id, table = uuid.UUID(int=5), PreprocessorTable(path=source)
        opened = await open_preprocessor(table, tmp_path / "copy", job_id, PEER)
        assert opened is not None
        (source / "tokenizer.json").write_text("changed since")
        assert isinstance(opened.reference, PeersReference)
        assert opened.reference.filenames == ("tokenizer.json", "tokenizer_config.json")
        found = opened.resolve(PullRequest(dataset=f"{job_id}/preprocessor", index=0))
        assert isinstance(found, PullSource)
        assert isinstance(found.source, Path)
        assert found.source.read_text() == "{}"
        assert await open_preprocessor(None, tmp_path / "none", job_id, PEER) is None
        with pytest.raises(JobFailedError, match=r"missing\.json"):
            lacking = PreprocessorTable(path=source, filenames=("missing.json",))
            await open_preprocessor(lacking, tmp_path / "other", job_id, PEER)

    run(case)


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    async def case() -> None:
        model = ModelTable(path=tmp_path, type="vision-classification")
        with pytest.raises(JobFailedError, match=r"holds no \*\.safetensors"):
            await open_start_model(model, tmp_path / "copy", uuid.UUID(int=5), PEER)

    run(case)


def update(path: Path, number: int, name: str = "w") -> Path:
    write_update(path, {name: (3,)}, [(name, np.full(3, number, np.float32))], UpdateMetadata(round=number))
    return path


def weights(folder: Path) -> list[float]:
    with TensorFile(folder / "model.safetensors") as file:
        values: list[float] = file.stored("w").tolist()
        return values


def test_outer_updates_are_applied_once_and_in_order(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")

    async def case() -> None:
        result = ResultModel(folder, OUTER, every=2)
        await result.apply_update(update(tmp_path / "u1", 1), 1)
        assert weights(folder) == [1.0] * 3
        await result.apply_update(update(tmp_path / "again", 1), 1)
        await result.apply_update(update(tmp_path / "u2", 2), 2)
        assert weights(folder) == [4.0] * 3
        await result.apply_update(update(tmp_path / "u3", 3), 3)
        await result.finish()
        assert weights(folder) == [7.0] * 3
        assert result.round == 3

    run(case)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "outer-state"]


def test_trained_model_is_synced_before_the_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kept = make_model(tmp_path / "model"), []
    monkeypatch.setattr("os.fsync", lambda fd: kept.append(os.fstat(fd).st_ino))

    async def case() -> None:
        result = ResultModel(folder, OUTER)
        await result.apply_update(update(tmp_path / "u1", 1), 1)
        await result.finish()
        write_result(tmp_path / "result.json", {"rounds": 1})

    run(case)
    wanted = (folder / "model.safetensors", folder / "config.json", folder, tmp_path / "result.json", tmp_path)
    assert {path.stat().st_ino for path in wanted} <= set(kept)
    assert weights(folder) == [2.0, 2.0, 2.0]


def test_mismatched_update_fails_the_job(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")

    async def case() -> None:
        with pytest.raises(JobFailedError, match="cannot be added to the model"):
            await ResultModel(folder, OUTER).apply_update(update(tmp_path / "u1", 1, "stranger"), 1)

    run(case)


def test_update_is_refused_for_want_of_room_or_of_the_directory(tmp_path: Path) -> None:
    result = ResultModel(make_model(tmp_path / "model"), OUTER)
    assert result.lacks_room(1) is None
    lacking = result.lacks_room(1 << 62)
    assert lacking is not None
    assert lacking.startswith(f"{tmp_path}: ")
    assert f"an outer update has {1 << 62} bytes" in lacking
    gone = ResultModel(tmp_path / "gone" / "model", OUTER).lacks_room(1)
    assert gone is not None
    assert f"No such file or directory: '{tmp_path / 'gone' / 'model'}'" in gone


def test_error_while_an_update_is_applied_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def case() -> None:
        with pytest.raises(JobFailedError) as caught:
            await ResultModel(make_model(tmp_path / "model"), OUTER).apply_update(update(tmp_path / "u1", 1), 1)
        assert f"No space left on device: '{tmp_path / 'model'}'; free space on that disk" in str(caught.value)

    monkeypatch.setattr("hypha_proto.global_model.GlobalModel.add", fail)
    run(case)
