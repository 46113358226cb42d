"""Every TOML block of the user's documents loads as the configuration of its program."""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.doc_snippets import Block, block, blocks, completed_scheduler, completed_worker
from support.wheelhouse import ROOT

from hypha_net.node.config.loader import Loaded, load_config
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference, Preprocessor, TrainConfig
from hypha_scheduler.config import SchedulerConfig
from hypha_scheduler.strategies.diloco.specs import PlacedJob, role_requests
from hypha_worker.cli import main as worker_main
from hypha_worker.config import WorkerConfig

WORKER = [each for each in blocks(language="toml") if each.document.startswith("worker")]
SCHEDULER = blocks("scheduler", "toml")
COMPLETE = block("worker-older:175")


def by_name(each: Block) -> str:
    return each.name


def worker(text: str, tmp_path: Path) -> Loaded[WorkerConfig]:
    (tmp_path / "worker.toml").write_text(text)
    return load_config(WorkerConfig, tmp_path / "worker.toml", {}, {})


def scheduler(text: str, tmp_path: Path) -> Loaded[SchedulerConfig]:
    (tmp_path / "scheduler.toml").write_text(text)
    return load_config(SchedulerConfig, tmp_path / "scheduler.toml", {}, {})


def test_every_block_has_a_row_in_the_table_and_every_row_a_block() -> None:
    page = (ROOT / "docs" / "blocks.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+:\d+)` \| (\w+) \|", page, re.MULTILINE)
    assert [name for name, _ in rows] == [each.name for each in blocks()]
    assert dict(rows) == {each.name: each.language for each in blocks()}


def test_every_test_that_the_table_names_exists() -> None:
    page = (ROOT / "docs" / "blocks.md").read_text()
    named = set(re.findall(r"`(test_docs_\w+)::(test_\w+)`", page))
    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(), f"{file}::{test}"


def test_blocks_are_of_kinds_that_tests_know() -> None:
    assert {each.language for each in blocks()} == {"toml", "shell", "http", "json", "yaml", "sse"}
    assert len(blocks(language="toml")) == len(WORKER) + len(SCHEDULER)


@pytest.mark.parametrize("each", WORKER, ids=by_name)
def test_a_block_of_a_worker_loads(each: Block, tmp_path: Path) -> None:
    loaded = worker(completed_worker(each.text), tmp_path)
    written = tomllib.loads(each.text)
    assert written
    if each is not COMPLETE and each.name != COMPLETE.name:
        assert not [text for text in loaded.warnings if "is taken as a top-level key" in text]
        origins = {key.split(".")[0].split("[")[0] for key in loaded.origins}
        assert set(written) <= origins


@pytest.mark.parametrize("each", SCHEDULER, ids=by_name)
def test_a_block_of_a_scheduler_loads(each: Block, tmp_path: Path) -> None:
    loaded = scheduler(completed_scheduler(each.text), tmp_path)
    assert not [text for text in loaded.warnings if "is taken as a top-level key" in text]


def test_the_complete_worker_as_it_stands(tmp_path: Path) -> None:
    loaded = worker(COMPLETE.text, tmp_path)
    config = loaded.config
    assert config.cert_pem == Path("/etc/hypha/certs/worker-cert.pem")
    assert config.gateway_addresses == ["/ip4/203.0.113.50/tcp/4001", "/ip4/198.51.100.25/tcp/4001"]
    assert config.work_dir == Path("/var/hypha/work")
    assert (config.resources.cpu, config.resources.gpu) == (32, 48)
    assert [each.name for each in config.executors] == ["diloco-transformer", "parameter-server"]
    assert config.executors[0].args[-2:] == ["--job", "{JOB_JSON}"]
    assert config.telemetry_endpoint == "http://otel-collector:4318"
    assert config.telemetry_attributes["worker.instance"] == "worker-gpu-01"
    lines = COMPLETE.text.splitlines()
    for key in ("work_dir", "telemetry_endpoint", "telemetry_protocol"):
        [number] = [index for index, line in enumerate(lines, 1) if line.startswith(f"{key} =")]
        assert [text for text in loaded.warnings if f"worker.toml:{number}: {key} stands under [" in text], key


def test_the_complete_worker_is_shown_by_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(COMPLETE.text)
    result = CliRunner().invoke(worker_main, ["config", "show", "--config", str(file)])
    assert result.exit_code == 0, result.output
    assert "resources.gpu = 48.0" in result.stdout


def test_resources_and_offer(tmp_path: Path) -> None:
    resources = worker(completed_worker(block("worker:25").text), tmp_path).config.resources
    assert (resources.cpu, resources.memory, resources.storage, resources.gpu) == (16, 64, 500, 24)
    offer = worker(completed_worker(block("worker:33").text), tmp_path).config.offer
    assert (offer.price, offer.floor, offer.is_whole, offer.evaluation) == (150.0, 120.0, True, "profit")
    assert offer.schedulers == []


@pytest.mark.parametrize("name", ["worker:50", "worker-older:123", "worker-older:291"])
def test_executors_keep_their_words_for_the_job(name: str, tmp_path: Path) -> None:
    [executor] = worker(completed_worker(block(name).text), tmp_path).config.executors
    assert (executor.job_class, executor.name, executor.runtime) == ("train", "diloco-transformer", "process")
    assert executor.cmd == "uv"
    assert executor.args[0] == "run"
    assert {"{SOCKET_PATH}", "{WORK_DIR}", "{JOB_JSON}"} <= set(executor.args)


@pytest.mark.parametrize("name", ["worker:79", "scheduler:163"])
def test_telemetry_as_text_becomes_tables_and_its_headers_stay_hidden(name: str, tmp_path: Path) -> None:
    make, load = (completed_worker, worker) if name.startswith("worker") else (completed_scheduler, scheduler)
    config = load(make(block(name).text), tmp_path).config
    assert config.telemetry_headers == {"Authorization": "Basic <Api Key>"}
    assert config.telemetry_attributes["deployment.environment"] == "<Environment>"
    assert config.telemetry_sample_ratio == 0.1
    shown = CliRunner().invoke(worker_main, ["config", "show", "--config", str(tmp_path / "worker.toml")])
    assert "Api Key" not in shown.output


@pytest.mark.parametrize("name", ["worker-older:161", "worker-older:565"])
def test_telemetry_attributes_as_a_table(name: str, tmp_path: Path) -> None:
    config = worker(completed_worker(block(name).text), tmp_path).config
    assert config.telemetry_attributes["service.name"] == "hypha-worker"
    assert config.telemetry_attributes["worker.region"] == "us-west-2"


def test_the_whole_page_of_the_scheduler_is_one_file(tmp_path: Path) -> None:
    """Concatenates its blocks: top-level keys then follow the last table, and are hoisted."""
    text = completed_scheduler("\n".join(each.text for each in SCHEDULER))
    loaded = scheduler(text, tmp_path)
    [job] = loaded.config.jobs
    train, aggregate = role_requests(job)
    assert job.model.task == "image-classification"
    assert (train.count, train.bid, train.max_price) == (4, 110.0, 160.0)
    assert (train.spec.resources.gpu, train.spec.resources.cpu, train.spec.resources.memory) == (10, 2, 8)
    assert (aggregate.bid, aggregate.max_price) == (80.0, 120.0)
    assert (job.outer_optimizer.learning_rate, job.outer_optimizer.momentum) == (0.7, 0.9)
    assert loaded.config.bridge_address == "aim-bridge.internal:61000"
    hoisted = [text for text in loaded.warnings if "is taken as a top-level key" in text]
    assert len(hoisted) == 7  # six of telemetry, and status_bridge
    assert "hf_..." not in json.dumps(job.model_dump(mode="json"))


def test_the_optional_keys_of_the_inner_optimiser(tmp_path: Path) -> None:
    """The block shows them commented out."""
    text = block("scheduler:93").text.replace("# Optional: ", "")
    [job] = scheduler(completed_scheduler(text), tmp_path).config.jobs
    assert (job.inner_optimizer.betas, job.inner_optimizer.epsilon) == ((0.9, 0.999), 1e-8)


def test_the_task_definition_of_the_early_design_is_no_json() -> None:
    """It has `...` and trailing commas; `test_e2e_sources` runs it without them."""
    with pytest.raises(json.JSONDecodeError):
        json.loads(block("api:37").text)


def test_the_preprocessor_of_a_vision_model_reaches_the_executors(tmp_path: Path) -> None:
    text = completed_scheduler(block("scheduler:78").text).replace('"causal-lm"', '"vision-classification"')
    [job] = scheduler(text, tmp_path).config.jobs
    peer = PeerId.from_public_key(bytes(32))
    model = HuggingFaceReference(repository="owner/repo", filenames=("config.json",))
    config = PlacedJob(uuid.UUID(int=1), job, peer, peer, (peer,), model).train_config()
    assert isinstance(config, TrainConfig)
    artifact = HuggingFaceReference(repository="l45k/Resnet50", filenames=("preprocessor_config.json",), token="hf_...")
    assert config.preprocessor == Preprocessor(task="image", artifact=artifact, input_names=())


@pytest.mark.parametrize(
    ("name", "task"),
    [("vision-classification", "image-classification"), ("causal-lm", "causal-lm"), ("torch", "torch")],
)
def test_the_model_types_of_the_page(name: str, task: str, tmp_path: Path) -> None:
    """`torch` models are classes allowed by the worker's owner, so only the job names their input tensors."""
    text = block("scheduler:62").text.replace("vision-classification", name) + 'input_names = ["x", "y"]\n'
    [job] = scheduler(completed_scheduler(text), tmp_path).config.jobs
    assert (job.model.task, job.model.inputs) == (task, ("x", "y"))
