"""What is shown of a job's events, and which jobs a name finds."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from support.diloco_simulation import FakeDataset

from hypha_net import rpc, transfer
from hypha_net.dataset_directory import announce_dataset
from hypha_net.testing import MemoryNetwork
from hypha_proto.codec import to_json
from hypha_proto.dataset_listing import LIST_DATASETS, DatasetPage, ListDatasets, ListedDataset
from hypha_proto.datasets import DatasetRecord, Manifest, SliceEntry
from hypha_proto.ids import PeerId, printable_name
from hypha_proto.record_file import EVENTS
from hypha_proto.transfer import PullRequest
from hypha_scheduler.cli import main
from hypha_scheduler.errors import JobRefusedError
from hypha_scheduler.jobs.config import Requirement
from hypha_scheduler.jobs.events import EventFile
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.submission.catalog import find_jobs, list_jobs
from hypha_scheduler.submission.dataset_check import DATASET_TIMEOUT, check_datasets
from hypha_scheduler.submission.job_view import JobView, readable_seconds

PEER, SERVER = "12D3KooWworker", "12D3KooWserver"


def placed(at: float) -> dict[str, Any]:
    workers = [
        {"peer": PEER, "role": "train", "price": 36.0, "name": "worker-7"},
        {"peer": SERVER, "role": "aggregate", "price": 72.0},
    ]
    return {"event": "placement", "time": at, "seconds": 2.5, "workers": workers}


def round_closed(number: int, at: float) -> dict[str, Any]:
    return {
        "event": "round",
        "time": at,
        "round": number,
        "samples": 640,
        "loss": 0.5,
        "samples_per_second": 64.0,
        "waits": {PEER: 0.25},
        "counts": {PEER: 20},
    }


def test_a_job_is_shown_with_its_workers_rounds_cost_and_end() -> None:
    view = JobView()
    events = [
        {"event": "accepted", "time": 0.0, "rounds": 10},
        placed(100.0),
        round_closed(1, 110.0),
        round_closed(2, 120.0),
        {"event": "metric", "time": 120.0, "worker": PEER, "name": "loss", "value": 1.0},
        {
            "event": "worker_late",
            "time": 130.0,
            "worker": PEER,
            "worker_name": "worker-7",
            "round": 3,
            "reason": "it is slow",
        },
        {"event": "worker_lost", "time": 150.0, "worker": PEER, "worker_name": "worker-7", "reason": "it is gone"},
    ]
    assert [view.add(event) for event in events] == [
        None,
        "placed after 2.5 s: worker-7…worker (train, 36/h), …server (aggregate, 72/h)",
        "round 1 of 10: loss 0.5, 64 samples/s, batch size 32, longest wait 0.2 s, cost 0.3",
        "round 2 of 10: loss 0.5, 64 samples/s, batch size 32, longest wait 0.2 s, cost 0.6, 80 s left",
        None,
        "worker late: worker-7…worker, round 3: it is slow",
        "worker lost: worker-7…worker: it is gone",
    ]
    assert (view.late, view.lost, list(view.workers)) == (1, 1, [SERVER])
    assert view.cost(150.0) == pytest.approx(1.5)  # 50 s of both
    assert view.cost(250.0) == pytest.approx(3.5)  # and 100 s of the other
    assert view.add({"event": "failed", "time": 200.0, "error": "x", "cancelled": True}) == "cancelled: x, cost 2.5"
    assert (view.state, view.cost(1e6), view.seconds_left) == ("cancelled", pytest.approx(2.5), None)


def test_durations_are_readable() -> None:
    assert [readable_seconds(s) for s in (3.2, 89, 120, 5400)] == ["3 s", "89 s", "2 min", "1 h 30 min"]


def test_a_certificates_name_cannot_control_a_terminal() -> None:
    assert printable_name("worker\x1b[2J") == "worker?[2J"
    assert len(printable_name("x" * 1000)) == 64


# -------------------------------------------------------------------------------------------------------- the catalogue


def write_job(runs: Path, name: str, *events: tuple[str, dict[str, Any]], job_id: uuid.UUID | None = None) -> str:
    directory = runs / str(job_id or uuid.uuid4())
    directory.mkdir(parents=True)
    with EventFile(directory / EVENTS) as file:
        file.write("accepted", job_id=directory.name, name=name, type="diloco")
        for _ in range(2000):  # more than the catalogue reads
            file.write("metric", None, worker=PEER, name="loss", value=1.0)
        for event, fields in events:
            file.write(event, **fields)
    return directory.name


def test_the_catalogue_tells_how_jobs_have_ended(tmp_path: Path) -> None:
    ends: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
        "finished": (("finished", {}),),
        "failed": (("failed", {"error": "no"}),),
        "cancelled": (("failed", {"error": "no", "cancelled": True}),),
        "interrupted": (("interrupted", {"reason": "stopped"}),),
        "killed": (),
        "resumed": (("failed", {"error": "no"}), ("resumed", {})),
    }
    for name, events in ends.items():
        write_job(tmp_path, name, *events)
    (tmp_path / "not-a-job").mkdir()
    (tmp_path / str(uuid.uuid4())).mkdir()
    found = {entry.name: entry.state for entry in list_jobs(tmp_path, {}, ended=True)}
    assert found == {name: name for name in ends} | {"killed": "interrupted", "resumed": "interrupted"}
    assert list_jobs(tmp_path, {}, ended=False) == []
    assert list_jobs(tmp_path / "none", {}, ended=True) == []


def test_jobs_are_found_by_name_id_and_beginning_of_id(tmp_path: Path) -> None:
    first, second = uuid.UUID(int=0xAB << 120), uuid.UUID(int=0xAC << 120)
    write_job(tmp_path, "ab", job_id=second)
    write_job(tmp_path, str(second), job_id=first)

    def find(wanted: str) -> set[str]:
        return {entry.job_id for entry in find_jobs(tmp_path, {}, wanted)}

    assert find(str(second)) == {str(second)}  # the id counts, and not the other's name
    assert find("AC0") == {str(second)}
    assert find("ab") == {str(first), str(second)}
    assert find("../x") == find("") == set()


def test_resume_takes_a_name_and_refuses_one_that_several_jobs_have(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ids = [write_job(runs, "twice", ("failed", {"error": "no"})) for _ in range(2)]
    one = write_job(runs, "once", ("failed", {"error": "no"}))
    for name in ("certificate", "key", "ca"):
        (tmp_path / name).touch()
    config = tmp_path / "s.toml"
    config.write_text(f'{CERTIFICATES}output_dir = "runs"\n')

    def resume(job: str) -> str:
        done = CliRunner().invoke(main, ["resume", job, "--config", str(config)])
        assert done.exit_code == 2, done.output
        return done.output

    assert all(job_id in resume("twice") for job_id in ids)
    assert "no jobs in" in resume("never")
    assert f"{one}: there is no job to resume: it has no journal.jsonl" in resume("once")


CERTIFICATES = (
    'cert_pem = "certificate"\nkey_pem = "key"\ntrust_pem = "ca"\ngateway_addresses = ["/ip4/127.0.0.1/tcp/1"]\n'
)


# --------------------------------------------------------------------------------------------------------- submission


@pytest.mark.parametrize("name", ["-x", "", "a b", "x" * 64, "../up"])
def test_a_name_is_a_word(name: str) -> None:
    model = {"repository": "a/b", "type": "auto"}
    table = {"dataset": "d", "model": model, "inner_optimizer": {"learning_rate": 1}}
    assert DilocoJobConfig.model_validate(table | {"name": "run-7.b_2"}).name == "run-7.b_2"
    with pytest.raises(ValueError, match="name"):
        DilocoJobConfig.model_validate(table | {"name": name})


def job_on(dataset: str, kind: str) -> DilocoJobConfig:
    model = {"repository": "a/b", "type": kind}
    table = {"dataset": dataset, "model": model, "inner_optimizer": {"learning_rate": 1}}
    return DilocoJobConfig.model_validate(table)


@pytest.mark.virtual_clock
async def test_an_unknown_dataset_is_told_within_ten_seconds() -> None:
    job = job_on("mnits", "auto")
    async with MemoryNetwork(seed=1).endpoint("scheduler") as endpoint:
        began = anyio.current_time()
        with pytest.raises(JobRefusedError, match=r"'mnits': no data node announces it; correct the name"):
            await check_datasets(endpoint, job)
        assert anyio.current_time() - began <= DATASET_TIMEOUT + 1


@pytest.mark.virtual_clock
async def test_the_error_about_an_unknown_dataset_names_those_that_a_gateway_lists() -> None:
    job = job_on("mnits", "auto")
    others = tuple(ListedDataset(name=f"x{n:02}", num_slices=1, providers=1, manifests=1) for n in range(20))
    mnist = ListedDataset(name="mnist", num_slices=1, providers=1, manifests=1)

    async def answer(_peer: PeerId, _request: ListDatasets) -> DatasetPage:
        return DatasetPage(datasets=(mnist, *others))

    network = MemoryNetwork(seed=1)
    async with network.endpoint("scheduler") as endpoint, network.endpoint("gateway") as gateway:
        rpc.serve(gateway, LIST_DATASETS, answer)
        endpoint.gateway_peers = {"/memory/gateway": gateway.peer_id}
        began = anyio.current_time()
        with pytest.raises(JobRefusedError, match=r"; the gateways know 'mnist', 'x.* and 11 more$"):
            await check_datasets(endpoint, job)
        assert anyio.current_time() - began <= DATASET_TIMEOUT + 1


async def test_columns_that_a_job_cannot_use_are_told_at_once(tmp_path: Path) -> None:
    job = job_on("digits", "causal-lm")
    entry = SliceEntry(file="a", samples=1, size=1, digest=f"blake3:{'0' * 64}")
    columns = {"pixel_values": "float32[8,8]", "labels": "int64"}
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(to_json(Manifest, Manifest(dataset="digits", slices=(entry,), columns=columns)))
    network = MemoryNetwork(seed=1)
    async with network.endpoint("scheduler") as endpoint, network.endpoint("data") as data:

        async def give_manifest(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
            return transfer.PullSource(manifest)

        transfer.serve_pulls(data, give_manifest)
        await announce_dataset(data, "digits", DatasetRecord(num_slices=1))
        with pytest.raises(JobRefusedError, match=r"has no column 'input_ids'; it has pixel_values, labels;"):
            await check_datasets(endpoint, job)


TEXT, IMAGE = {"type": "tokenizer", "path": "t"}, {"type": "image", "path": "t"}


@pytest.mark.parametrize(
    ("model", "preprocessor", "columns", "lacking"),
    [
        ({"type": "causal-lm"}, None, "input_ids", ()),
        ({"type": "causal-lm"}, None, "text", ("input_ids",)),
        ({"type": "causal-lm"}, TEXT, "text", ()),
        ({"type": "causal-lm"}, TEXT, "body", ("text",)),
        ({"type": "causal-lm"}, TEXT | {"input_names": ["body"]}, "body", ()),
        ({"type": "sequence-classification"}, TEXT, "text", ("labels",)),
        ({"type": "seq2-seq-lm"}, TEXT | {"input_names": ["a", "b", "c"]}, "a b c", ()),  # the third makes labels
        ({"type": "vision-classification"}, None, "image", ("pixel_values", "labels")),
        ({"type": "vision-classification"}, IMAGE, "image labels", ()),
        ({"type": "vision-classification", "input_names": ["x", "y"]}, None, "x", ("y",)),
        ({"type": "torch", "input_names": ["x", "y"]}, None, "x", ()),  # y may have a default
        ({"type": "torch", "input_names": ["x", "y"]}, None, "y", ("x",)),
        ({"type": "audio-classification"}, None, "input_values", ()),  # depends on the architecture
    ],
)
def test_lacking_columns_of_training_data_are_named(
    model: dict[str, Any], preprocessor: dict[str, Any] | None, columns: str, lacking: tuple[str, ...]
) -> None:
    tables = {"dataset": "d", "model": {"path": "m"} | model, "inner_optimizer": {"learning_rate": 1}}
    job = DilocoJobConfig.model_validate(tables | ({} if preprocessor is None else {"preprocessor": preprocessor}))
    faults = job.dataset_faults(FakeDataset(columns=dict.fromkeys(columns.split(), "uint8")))
    assert [re.findall(r"has no column '(\w+)'", fault) for fault in faults] == [[name] for name in lacking]
    assert job.dataset_faults(FakeDataset(columns=None)) == []
    resources = job.resources.model_copy(update={"worker": (Requirement(kind="of-mine"),)})
    assert job.model_copy(update={"resources": resources}).dataset_faults(FakeDataset(columns={})) == []


@pytest.mark.virtual_clock
async def test_a_dataset_that_is_announced_meanwhile_is_accepted() -> None:
    job = job_on("digits", "auto")
    network = MemoryNetwork(seed=1)
    async with network.endpoint("scheduler") as endpoint, network.endpoint("data") as data:

        async def announce_later() -> None:
            await anyio.sleep(3)
            await announce_dataset(data, "digits", DatasetRecord(num_slices=1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(announce_later)
            await check_datasets(endpoint, job)
            tasks.cancel_scope.cancel()
