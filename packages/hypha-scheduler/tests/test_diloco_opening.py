"""Opening a DiLoCo job on real files: fresh, after its last recorded round, and with files that were changed since."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from support.diloco_simulation import PEERS, SERVER, FakeContext, FakeDataset, job_table

from hypha_proto.update_file import TensorFileWriter, TensorInfo, UpdateMetadata, write_update
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import Artifact, open_start_model
from hypha_scheduler.jobs.config import ArtifactTable, StartModelTable
from hypha_scheduler.strategies.base import DatasetView, Lease, WriteJournal
from hypha_scheduler.strategies.diloco.records import round_record
from hypha_scheduler.strategies.diloco.result_model import ResultModel
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, TRAIN, outer_optimizer
from hypha_scheduler.strategies.diloco.strategy import STRATEGY

Journal = list[dict[str, Any]]


class Context(FakeContext):
    """Context with a directory of its own, and a dataset whose manifest is `manifest`."""

    manifest = "{}"

    async def open_dataset(self, source: Any, *, timeout: float, manifest: str = "manifest.json") -> DatasetView:
        await anyio.Path(self.directory / manifest).write_text(self.manifest)
        return FakeDataset()

    async def prepare_artifact(
        self, table: ArtifactTable, name: str, copy: Path, *, unchanged: bool = False
    ) -> Artifact:
        assert isinstance(table, StartModelTable)
        return await open_start_model(table, copy, self.job_id, self.scheduler, name, unchanged=unchanged)


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with TensorFileWriter(folder / "model.safetensors", {"w": TensorInfo("F32", (3,))}, {}) as writer:
        writer.write("w", np.ones(3, np.float32))
    return folder


async def interrupted(tmp_path: Path) -> tuple[Context, Any, Journal]:
    """Begin a job, record two rounds and stop; return its context, configuration and journal."""
    context, job = Context(tmp_path / "job"), job_table(model={"path": str(make_model(tmp_path / "start"))})
    context.directory.mkdir()
    leases = [Lease(uuid.uuid4(), peer, TRAIN, 100.0) for peer in PEERS[:3]]
    leases.append(Lease(uuid.uuid4(), SERVER, AGGREGATE, 100.0))
    async with STRATEGY.open(job, context, []) as operator:
        effects = (*operator.on_start(0.0), *operator.on_leases_acquired(leases, 1.0))
    journal: Journal = [{"record": e.kind, **e.fields} for e in effects if isinstance(e, WriteJournal)]
    result = ResultModel(context.directory, outer_optimizer(job))
    for number in (1, 2):
        update = context.directory / "updates" / f"round-{number}-ab12.safetensors"
        write_update(update, {"w": (3,)}, [("w", np.ones(3, "f4"))], UpdateMetadata(round=number))
        record = round_record(number, 1, [], [], await result.advance(update, number), None)
        await result.commit(number)
        journal.append({"record": record.kind, **record.fields})
    return context, job, journal


async def test_a_job_goes_on_with_its_own_copy_of_the_start_model(tmp_path: Path) -> None:
    context, job, journal = await interrupted(tmp_path)
    shutil.rmtree(tmp_path / "start")
    async with STRATEGY.open(job, context, journal):
        pass
    assert (context.directory / "outer-state" / "round-2").is_dir()


def damage_weights(directory: Path) -> None:
    path = directory / "outer-state" / "round-2" / "weights.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def remove_state(directory: Path) -> None:
    shutil.rmtree(directory / "outer-state" / "round-2")


def change_start_model(directory: Path) -> None:
    (directory / "start-model" / "config.json").write_text('{"changed": true}')


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (damage_weights, r"round-2/weights\.safetensors: the file is damaged"),
        (remove_state, r"round-2: the directory is missing"),
        (change_start_model, r"the job cannot go on: model is 'blake3:\w+', and was 'blake3:\w+'"),
    ],
)
async def test_files_that_were_changed_since_are_named(
    tmp_path: Path, change: Callable[[Path], None], what: str
) -> None:
    context, job, journal = await interrupted(tmp_path)
    change(context.directory)
    with pytest.raises(JobFailedError, match=what):
        async with STRATEGY.open(job, context, journal):
            pass


async def test_a_dataset_that_was_changed_since_is_named(tmp_path: Path) -> None:
    context, job, journal = await interrupted(tmp_path)
    context.manifest = '{"changed": true}'
    with pytest.raises(JobFailedError, match=r"the manifest of dataset '.*' has the digest"):
        async with STRATEGY.open(job, context, journal):
            pass
