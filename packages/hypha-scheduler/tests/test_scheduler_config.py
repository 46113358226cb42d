"""Scheduler configuration: documented keys are valid, invalid values are refused with the reason."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from hypha_net.node.config.errors import ConfigError
from hypha_net.node.config.introspection import accepts, table_types
from hypha_net.node.config.loader import load_config
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    AggregateConfig,
    CosineWithWarmup,
    HuggingFaceReference,
    PeersReference,
    SchedulerReference,
    TrainConfig,
    WarmupStableDecay,
)
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.resources import Resources
from hypha_scheduler.allocation.auction import AuctionTable
from hypha_scheduler.cli import main
from hypha_scheduler.config import SchedulerConfig
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.service import serve
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.specs import PlacedJob, Slot, evaluation_shares, role_requests, round_settings
from hypha_scheduler.strategies.registry import parse_job
from hypha_scheduler.submission.client import read_job

PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(5)]

DOCUMENTED = """
cert_pem = "/etc/hypha/scheduler-cert.pem"
key_pem = "/etc/hypha/scheduler-key.pem"
trust_pem = "/etc/hypha/ca-bundle.pem"
gateway_addresses = ["/ip4/203.0.113.50/tcp/4001"]
status_bridge = "aim-bridge.internal:61000"

[scheduler.job.model]
repository = "owner/repo"
revision = "main"
filenames = ["config.json", "model.safetensors"]
token = "hf_secret"
type = "vision-classification"

[scheduler.job.dataset]
dataset = "imagenet"

[scheduler.job.inner_optimizer]
learning_rate = 0.001

[scheduler.job.outer_optimizer]
learning_rate = 0.7
momentum = 0.9

[scheduler.job.resources]
num_workers = 4

[[scheduler.job.resources.worker]]
type = "GPU"
min = 10.0

[[scheduler.job.resources.worker]]
type = "CPU"
min = 2.0

[[scheduler.job.resources.worker]]
kind = "diloco-transformer"

[[scheduler.job.resources.parameter_server]]
type = "Memory"
min = 16.0

[[scheduler.job.resources.parameter_server]]
kind = "parameter-server"

[scheduler.job.resources.worker_price]
bid = 110.0
max = 160.0

[scheduler.job.resources.parameter_server_price]
bid = 80.0
max = 120.0
"""


def job(**changes: Any) -> DilocoJobConfig:
    plain: dict[str, Any] = {
        "dataset": "digits",
        "model": {"path": "model", "type": "vision-classification"},
        "inner_optimizer": {"learning_rate": 0.001},
    }
    return DilocoJobConfig.model_validate(plain | changes)


def load(folder: Path, text: str = DOCUMENTED) -> Any:
    (folder / "scheduler.toml").write_text(text)
    return load_config(SchedulerConfig, folder / "scheduler.toml", {}, {})


def placed(made: DilocoJobConfig, workers: int = 3, **about: Any) -> PlacedJob:
    model = HuggingFaceReference(repository="o/r", filenames=())
    return PlacedJob(uuid.UUID(int=1), made, PEERS[0], PEERS[1], tuple(PEERS[2 : 2 + workers]), model, **about)


def test_documented_configuration_yields_role_requests(tmp_path: Path) -> None:
    loaded = load(tmp_path).config
    [made] = loaded.jobs
    train, aggregate = role_requests(made)
    assert (train.count, train.bid, train.max_price) == (4, 110.0, 160.0)
    assert train.spec.resources == Resources(gpu=10, cpu=2)
    assert train.spec.executor == (ExecutorDescriptor("train", "diloco-transformer"),)
    assert (aggregate.count, aggregate.bid, aggregate.max_price) == (1, 80.0, 120.0)
    assert aggregate.spec.resources == Resources(memory=16)
    assert aggregate.spec.executor == (ExecutorDescriptor("aggregate", "parameter-server"),)
    assert loaded.bridge_address == "aim-bridge.internal:61000"
    assert "hf_secret" not in repr(loaded)
    assert "hf_secret" not in str(made.model_dump(mode="json"))


def test_a_token_that_workers_would_get_is_a_warning(tmp_path: Path) -> None:
    [warning] = load(tmp_path, DOCUMENTED.replace('"hf_secret"', '"hf_secret"\nserve = false')).warnings
    assert warning.startswith("scheduler.job.model.token is handed to every worker")
    assert load(tmp_path).warnings == ()


def test_a_token_that_no_worker_gets_is_no_warning() -> None:
    local = {"path": "model", "type": "vision-classification", "token": "hf_secret"}
    public = {"repository": "org/model", "type": "vision-classification"}
    assert job(model=local).warnings() == job(model=public).warnings() == []
    tokenizer: dict[str, Any] = {
        "repository": "org/tokenizer", "filenames": ["tokenizer.json"], "token": "hf_secret",
    }  # fmt: skip
    assert job(preprocessor=tokenizer).warnings() == []
    tokenizer["serve"] = False
    [warning] = job(preprocessor=tokenizer).warnings()
    assert warning.startswith("preprocessor.token is handed")


def test_several_jobs_and_shorthand_tables() -> None:
    plain = tomllib.loads(
        """
        [[jobs]]
        dataset = "a"
        model = { path = "m", type = "causal-lm" }
        inner_optimizer = { learning_rate = 1e-3 }
        resources = { worker = { gpu = 8, cpu = 2, kind = "mine" }, parameter_server = { memory = 4 } }
        """
    )
    made = DilocoJobConfig.model_validate(plain["jobs"][0])
    train, aggregate = role_requests(made)
    assert train.spec.resources == Resources(gpu=8, cpu=2)
    assert train.spec.executor == (ExecutorDescriptor("train", "mine"),)
    assert aggregate.spec.resources == Resources(memory=4)
    assert made.model.inputs == ("input_ids", "attention_mask", "labels")
    assert made.model.task == "causal-lm"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": 1}, "surprise\n.*not permitted"),
        ({"model": {"path": "m", "type": "nonsense"}}, "'nonsense' is not a model type; known: vision-cl"),
        ({"model": {"path": "m", "type": "torch"}}, 'input_names: type = "torch" needs them'),
        ({"preprocessor": {"repository": "o/r"}}, "filenames: name the preprocessor's files"),
        ({"preprocessor": {"repository": "o/r", "filenames": ["a"], "type": "nonsense"}}, "is not one of auto, token"),
        (
            {"model": {"path": "m", "type": "auto", "filenames": ["../secret"]}},
            "filenames.0\n.*'../secret' is not a rel",
        ),
        ({"resources": {"worker_price": {"bid": 10, "max": 5}}}, "max .5. is less than bid .10.: raise max"),
        ({"resources": {"num_workers": 2, "min_workers": 3}}, "min_workers .3. is more than num_workers .2."),
        ({"resources": {"worker": [{"type": "GPU"}]}}, "worker.0\n.*type and min go together"),
        ({"resources": {"worker": {"type": "CPU", "min": 1e300}}}, "worker.0.min\n.*less than or equal to"),
        ({"resources": {"worker": {"cpu": 1e300}}}, "worker.0.min\n.*less than or equal to"),
        ({"resources": {"allocation_timeout": float("inf")}}, "allocation_timeout\n.*finite"),
        ({"rounds": {"update_rounds": 0}}, "update_rounds\n.*greater than or equal to 1"),
        ({"rounds": {"timeout": float("inf")}}, "rounds.timeout\n.*finite"),
        ({"rounds": {"evaluate_every": 2}}, "name the dataset to evaluate on in dataset.evaluation"),
        ({"dataset": {"dataset": "a", "evaluation": "b"}}, "set rounds.evaluate_every to the number of rounds"),
        ({"inner_optimizer": {"learning_rate": float("inf")}}, "inner_optimizer.learning_rate\n.*finite"),
        ({"inner_optimizer": {"learning_rate": 1.0, "betas": (0.9, 1.0)}}, "betas.1\n.*less than 1"),
        ({"inner_optimizer": {"learning_rate": 1.0, "betas": (-0.1, 0.9)}}, "betas.0\n.*greater than or equal to 0"),
    ],
)
def test_invalid_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(**changes)


TOKENIZER = {"path": "tokenizer", "type": "tokenizer"}
LANGUAGE_MODEL = {"path": "model", "type": "causal-lm"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preprocessor": None}, "rows: name the folder or repository of the model's tokenizer in preprocessor"),
        (
            {"model": {"path": "m", "type": "masked-lm"}},
            "of type 'causal-lm', and model.type is 'masked-lm'",
        ),
        ({"rows": {"completion": "yes"}}, "it names no column, so every row would be the same"),
        ({"rows": {"completion": "{a", "prompt": "{b}"}}, "the '{' at character 1 has no counterpart"),
    ],
)
def test_rows_need_a_tokenizer_a_language_model_and_columns(changes: dict[str, Any], message: str) -> None:
    good = {"model": LANGUAGE_MODEL, "preprocessor": TOKENIZER, "rows": {"completion": "{a} {b}", "prompt": "{c}{a}"}}
    assert job(**good).rows.columns == ("c", "a", "b")
    with pytest.raises(ValidationError) as caught:
        job(**good | changes)
    assert message in str(caught.value)


def test_demand_starts_with_num_workers_and_grows_to_max_workers() -> None:
    made = job(resources={"num_workers": 3, "min_workers": 2, "max_workers": 5})
    train, aggregate = role_requests(made)
    assert (train.count, train.minimum, train.starts_at_minimum, train.settle) == (3, 2, True, 2.0)
    assert (aggregate.count, aggregate.minimum, aggregate.starts_at_minimum, aggregate.settle) == (1, 1, True, 2.0)
    assert [request.count for request in role_requests(made, has_begun=True)] == [5, 1]


def test_job_specs_of_a_placed_job() -> None:
    made = job(
        rounds={"update_rounds": 10, "avg_samples_between_updates": 480, "batch_size": 8},
        inner_optimizer={"learning_rate": 1e-3, "schedule": "cosine-with-warmup", "warmup_steps": 5},
        outer_optimizer={"nesterov": False},
        seed=9,
    )
    train = placed(made).train_config()
    assert isinstance(train, TrainConfig)
    assert train.batch_size == 8
    assert train.seed == 9
    assert train.model.input_names == ("pixel_values", "labels")
    assert train.data == SchedulerReference(peer=PEERS[0], dataset="digits")
    assert train.scheduler == CosineWithWarmup(warmup_steps=5, training_steps=200)
    assert train.round_steps == 20.0
    assert isinstance(train.updates, PeersReference)
    assert train.updates.peers == (PEERS[1],)
    aggregate = placed(made).aggregate_spec().aggregation
    assert isinstance(aggregate, AggregateConfig)
    assert isinstance(aggregate.results, PeersReference)
    assert aggregate.results.peers == (*PEERS[2:5], PEERS[0])
    assert aggregate.term == 1
    assert aggregate.optimizer.nesterov is False


def test_each_worker_has_a_number_of_its_own() -> None:
    configs = [placed(job()).train_config(Slot(number, number)) for number in range(3)]
    assert [config.member for config in configs if isinstance(config, TrainConfig)] == [0, 1, 2]
    assert [config.round_steps for config in configs if isinstance(config, TrainConfig)] == [None] * 3  # no schedule


def test_auction_settings_reach_the_auction(tmp_path: Path) -> None:
    text = DOCUMENTED + "\n[scheduler.auction]\ndecision_window = 0.5\ngpu = 10\nstorage = 0\n"
    table = load(tmp_path, text).config.scheduler.auction
    assert table == AuctionTable(decision_window=0.5, gpu=10.0, cpu=1.0, memory=0.1, storage=0.0)


@pytest.mark.parametrize("key", ["decision_window", "gpu", "cpu", "memory", "storage"])
@pytest.mark.parametrize("value", [-1.0, 1e7, float("nan"), float("inf")])
def test_auction_settings_are_bounded(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=rf"{key}\n"):
        AuctionTable.model_validate({key: value})


@pytest.mark.parametrize("price", [1e300, 1.0000001e9, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("key", ["bid", "max"])
def test_prices_are_finite_and_bounded(key: str, price: float) -> None:
    assert job(resources={"worker_price": {"bid": 1e9, "max": 1e9}}).resources.worker_price.max == 1e9
    with pytest.raises(ValidationError, match=rf"resources\.worker_price\.{key}\n"):
        job(resources={"worker_price": {"bid": 1.0, "max": 1.0, key: price}})


@pytest.mark.parametrize(
    ("slices", "counts"),
    [(7, {2: [0, 1], 3: [2, 3], 4: [4, 5, 6]}), (2, {3: [0], 4: [1]}), (3, {2: [0], 3: [1], 4: [2]})],
)
@pytest.mark.parametrize("form", [None, "jsonl"])
def test_each_evaluation_slice_belongs_to_one_worker(
    slices: int, counts: dict[int, list[int]], form: str | None
) -> None:
    made = job(rounds={"evaluate_every": 3}, dataset={"dataset": "digits", "evaluation": "held-out"})
    shares = evaluation_shares(3, DatasetView("held-out", PEERS[1], (None,) * slices, None, form))
    found: dict[int, list[int]] = {}
    for number in (2, 3, 4):
        config = placed(made, evaluation=shares).train_config(Slot(number - 2, number - 2))
        assert isinstance(config, TrainConfig)
        if config.evaluation is not None:
            assert config.evaluation.every == 3
            data = config.evaluation.data
            assert isinstance(data, PeersReference)
            assert data.peers == (PEERS[1],)
            assert data.resource is not None
            begin = data.resource.index
            assert {name[-6:] for name in data.filenames or ()} == {".jsonl" if form else "ensors"}
            found[number] = list(range(begin, begin + len(data.filenames or ())))
    assert found == counts


def test_wsd_schedule_decays_in_the_last_tenth_by_default() -> None:
    made = job(
        rounds={"update_rounds": 10, "avg_samples_between_updates": 400, "batch_size": 4},
        inner_optimizer={"learning_rate": 1e-3, "schedule": "wsd"},
    )
    config = placed(made, workers=1).train_config()
    assert isinstance(config, TrainConfig)
    assert config.scheduler == WarmupStableDecay(warmup_steps=0, decay_steps=100, training_steps=1000)


@pytest.mark.parametrize(
    ("rounds", "workers", "batch"),
    [
        ({"batch_size": 10}, 3, 10),
        ({"batch_size": 10, "max_batch_size": 4}, 3, 4),
        ({"avg_samples_between_updates": 1200}, 3, 64),
        ({"avg_samples_between_updates": 1200, "max_batch_size": 20}, 3, 16),
        ({"avg_samples_between_updates": 2}, 3, 1),
    ],
)
def test_automatic_batch_size_gives_workers_several_batches(rounds: dict[str, int], workers: int, batch: int) -> None:
    assert round_settings(job(rounds=rounds), workers).batch_size == batch


def load_with_table(folder: Path, table: str) -> Any:
    return load(folder, DOCUMENTED.replace("[scheduler.job.model]", f"{table}\n\n[scheduler.job.model]", 1))


def test_unknown_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_with_table(tmp_path, '[scheduler.job]\ntype = "dilco"')
    known = "no strategy 'dilco' is installed; known: diloco, inference, tasks; did you mean 'diloco'?"
    assert known in str(caught.value)


def test_strategies_that_are_not_listed_are_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'diloco' is installed, but scheduler\.strategies does not list it"):
        load_with_table(tmp_path, "[scheduler]\nstrategies = []")
    assert load_with_table(tmp_path, '[scheduler]\nstrategies = ["diloco"]').config.jobs[0].type == "diloco"


NUMBERS = {
    "inner_optimizer": ("learning_rate", "epsilon", "weight_decay", "max_grad_norm"),
    "outer_optimizer": ("learning_rate", "momentum"),
    "rounds": ("timeout", "start_timeout", "step_timeout", "merge_timeout"),
    "resources": ("allocation_timeout", "budget"),
}
COUNTS = {
    "inner_optimizer": ("warmup_steps", "total_steps", "decay_steps"),
    "rounds": (
        "update_rounds",
        "avg_samples_between_updates",
        "max_batch_size",
        "batch_size",
        "checkpoint_every",
        "evaluate_every",
    ),
    "model": ("seed",),
    "resources": ("num_workers", "min_workers", "max_workers"),
}
KEYS = [(table, key, 1e308) for table, keys in NUMBERS.items() for key in keys]
KEYS += [(table, key, 10**40) for table, keys in COUNTS.items() for key in keys]


@pytest.mark.parametrize(("table", "key", "value"), KEYS, ids=[f"{table}.{key}" for table, key, _ in KEYS])
def test_every_number_has_a_finite_bound(table: str, key: str, value: float) -> None:
    values = {"inner_optimizer": {"learning_rate": 1e-3}, "model": {"config": "c", "type": "causal-lm"}}.get(table, {})
    with pytest.raises(ValidationError) as caught:
        job(**{table: {**values, key: value}})
    [error] = caught.value.errors()
    assert error["loc"] == (table, key)
    assert error["type"] in ("less_than_equal", "less_than")


def test_bounds_are_tested_for_every_number() -> None:
    for name, info in DilocoJobConfig.model_fields.items():
        for table in table_types(info.annotation):
            numbers = {key for key, about in table.model_fields.items() if is_number(about.annotation)}
            assert numbers == {*NUMBERS.get(name, ()), *COUNTS.get(name, ())}, name


def is_number(annotation: Any) -> bool:
    return accepts(annotation, int) or accepts(annotation, float)


def test_scheduler_with_missing_files_in_its_configuration_runs_no_job(tmp_path: Path) -> None:
    absent = "\n".join(line for line in DOCUMENTED.splitlines() if not line.startswith(("repository", "revision")))
    config = load(tmp_path, absent.replace('filenames = ["config.json", "model.safetensors"]', 'path = "none"')).config
    lacking = rf"model\.path: there is no directory {tmp_path / 'none'} at the scheduler"
    with pytest.raises(JobFailedError, match=lacking):
        anyio.run(serve, config, None)


def test_init_writes_a_job_file_that_submit_reads_with_every_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(main, ["init", "--job"])
    assert (made.exit_code, made.output) == (0, "wrote job.toml\n")
    file = tmp_path / "job.toml"
    job = parse_job(read_job(file))
    assert job.type == "diloco"
    assert job.dataset_names == ("imagenet",)
    text = file.read_text()
    for key in type(job).model_json_schema()["properties"]:
        assert re.search(rf"^(# )?(\[+)?{key}\b", text, re.MULTILINE), key
    again = CliRunner().invoke(main, ["init", "--job"])
    assert again.exit_code == 1
    assert "job.toml: exists already; name another file with --out, or use --force" in again.output
    refused = CliRunner().invoke(main, ["init", "--job", "--name", "lab", "--out", "other.toml"])
    assert refused.exit_code == 2
    assert "--name has no effect with --job; leave it out" in refused.output
    assert not (tmp_path / "other.toml").exists()


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [(["schema"], {"numpy"}), (["jobs", "--config", "scheduler.toml"], {"numpy", "pydantic", "trio"})],
    ids=["schema", "jobs"],
)
def test_a_command_imports_what_it_needs_only(words: list[str], unneeded: set[str], tmp_path: Path) -> None:
    (tmp_path / "scheduler.toml").touch()
    command = [sys.executable, "-X", "importtime", "-c", "from hypha_scheduler.cli import main; main()", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hypha_scheduler.cli" in imported
    assert not imported & unneeded
