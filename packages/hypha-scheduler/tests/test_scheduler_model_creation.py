"""Start models that are created from a configuration and a seed or from a checkpoint, and the heads that they need."""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.stored_model import write_model

from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference
from hypha_proto.transfer import PullRequest
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import ArtifactCopies
from hypha_scheduler.jobs.config import ModelTable, StartModelTable
from hypha_scheduler.jobs.model_files import missing_files
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.result_model import START_MODEL
from hypha_scheduler.submission.client import read_job
from hypha_scheduler.submission.validation import validate_job

PEER = PeerId.from_public_key(bytes(32))
JOB = uuid.UUID(int=5)
CREATE = """
import json, pathlib, random, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
config = json.loads(pathlib.Path(given["--config-json"]).read_text())
if "width" not in config:
    sys.exit("no such width\\nthe model cannot be created")
out = pathlib.Path(given["--out"])
out.mkdir()
(out / "config.json").write_text(json.dumps({**config, "task": given["--task"]}))
numbers = random.Random(int(given["--seed"])).randbytes(config["width"])
header = json.dumps({"w": {"dtype": "U8", "shape": [len(numbers)], "data_offsets": [0, len(numbers)]}}).encode()
(out / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + numbers)
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    """Return a command that creates models as an executor's does."""
    script = tmp_path / "create.py"
    script.write_text(CREATE)
    return (sys.executable, str(script))


def configuration(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "plain", "width": 40, **changed}))
    return folder


def table(config: Path, seed: int | None = None) -> StartModelTable:
    return StartModelTable(config=config, seed=seed, type="causal-lm")


async def created(copy: Path, model: StartModelTable, command: tuple[str, ...]) -> dict[str, bytes]:
    """Open a start model; return the files that executors get."""
    copy.parent.mkdir(exist_ok=True)
    start = await ArtifactCopies(JOB, PEER, command=command).open(model, "model", copy, unchanged=True)
    found = {}
    assert isinstance(start.reference, PeersReference)
    for index, name in enumerate(start.reference.filenames):
        offered = start.resolve(PullRequest(dataset="", index=index))
        assert isinstance(offered, PullSource)
        assert isinstance(offered.source, Path)
        found[name] = await anyio.Path(offered.source).read_bytes()
    return found


async def test_the_same_configuration_and_seed_give_the_same_bytes(tmp_path: Path, command: tuple[str, ...]) -> None:
    config = configuration(tmp_path / "config")
    first = await created(tmp_path / "1" / START_MODEL, table(config, 7), command)
    assert first.keys() == {"config.json", "model.safetensors"}
    assert json.loads(first["config.json"]) == {"model_type": "plain", "width": 40, "task": "causal-lm"}
    assert await created(tmp_path / "2" / START_MODEL, table(config / "config.json", 7), command) == first
    assert await created(tmp_path / "3" / START_MODEL, table(config, 8), command) != first


async def test_a_tokenizer_beside_the_configuration_comes_with_the_model(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = configuration(tmp_path / "config")
    (config / "tokenizer.json").write_text('{"tokens": 4}')
    (config / "notes.md").write_text("notes")
    (config / "weights.bin").write_bytes(b"pickle")
    found = await created(tmp_path / "job" / START_MODEL, table(config), command)
    assert found.keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert b"task" in found["config.json"], "the configuration is that of the created model"


async def test_an_interrupted_job_creates_no_model_again(tmp_path: Path, command: tuple[str, ...]) -> None:
    config, copy = configuration(tmp_path / "config"), tmp_path / "job" / START_MODEL
    left = copy.with_name(f".{START_MODEL}-served")
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"of a scheduler that was killed")
    first = await created(copy, table(config), command)
    assert await created(copy, table(config), ("no-such-command",)) == first


async def test_a_command_that_fails_or_is_missing_is_named(tmp_path: Path, command: tuple[str, ...]) -> None:
    config = configuration(tmp_path / "config")
    (config / "config.json").write_text('{"model_type": "plain"}')
    copy = tmp_path / "job" / START_MODEL
    with pytest.raises(JobFailedError, match=r"failed:\n  \| no such width\n  \| the model cannot be created"):
        await created(copy, table(config), command)
    with pytest.raises(JobFailedError, match=r"no-such-command, which is not installed.*scheduler\.model_command"):
        await created(copy, table(config), ("no-such-command",))
    assert not await anyio.Path(copy).exists()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot be read at the scheduler: No such file"),
        ("{", "is not JSON"),
        ("[]", "is not the configuration of a model: it has no model_type"),
        ('{"model_type": 4}', "is not the configuration of a model: it has no model_type"),
    ],
)
def test_a_bad_configuration_is_refused_when_the_job_is_submitted(
    tmp_path: Path, content: str | None, what: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    job = {
        "dataset": "digits",
        "model": {"config": str(tmp_path / "config.json"), "type": "causal-lm"},
        "inner_optimizer": {"learning_rate": 1e-3},
    }
    with pytest.raises(ValueError, match=rf"model\.config: .*{what}"):
        validate_job(job)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({}, "set one of repository, path, file, s3, uri, dht, config"),
        ({"config": "c", "path": "p"}, "set one of repository, path, file, s3, uri, dht, config"),
        ({"path": "p", "seed": 4}, "seed: it decides the weights of a model from config"),
    ],
)
def test_a_model_has_one_source(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        StartModelTable.model_validate({"type": "causal-lm", **keys})


def test_the_seed_of_the_job_is_that_of_its_weights_unless_they_have_their_own(tmp_path: Path) -> None:
    job = {"dataset": "digits", "inner_optimizer": {"learning_rate": 1e-3}, "seed": 5}
    model = {"config": str(configuration(tmp_path)), "type": "causal-lm"}
    assert DilocoJobConfig.model_validate({**job, "model": model}).start_model.seed == 5
    assert DilocoJobConfig.model_validate({**job, "model": {**model, "seed": 6}}).start_model.seed == 6
    of_path = DilocoJobConfig.model_validate({**job, "model": {"path": str(tmp_path), "type": "causal-lm"}})
    assert of_path.start_model == of_path.model


def test_a_relative_configuration_is_relative_to_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('dataset = "digits"\n[model]\nconfig = "small"\ntype = "causal-lm"\n')
    assert read_job(tmp_path / "job.toml")["model"]["config"] == str(tmp_path / "small")


BODY = ("embeddings.word_embeddings.weight", "encoder.layer.0.output.dense.weight", "pooler.dense.bias")


@pytest.mark.parametrize(
    ("task", "architecture"),
    [
        ("sequence-classification", "BertModel"),
        ("sequence-classification", "GPT2LMHeadModel"),
        ("vision-classification", "ResNetModel"),
        ("vision-classification", "ViTForMaskedImageModeling"),
        ("masked-lm", "BertForTokenClassification"),
    ],
)
def test_a_base_model_is_refused_with_the_command_that_adds_a_head(
    task: str, architecture: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "base", BODY[:1], BODY[1:], architectures=[architecture])
    wire = task.replace("vision", "image")
    for table in (ModelTable(path=model, type=task), ModelTable(file=model, type=task)):
        assert missing_files(table) == [
            f"model.path: {model} has no head for {wire}: its config.json names {architecture}; add one with "
            f"`hypha-accelerate-executor create-model --from {model} --task {wire} --labels N --out DIR`"
        ]


@pytest.mark.parametrize(
    ("task", "architectures", "tensors"),
    [
        ("sequence-classification", ["BertForSequenceClassification"], BODY),
        ("sequence-classification", ["BertModel"], (*BODY, "classifier.weight")),
        ("sequence-classification", ["BertModel", "BertForSequenceClassification"], BODY),
        ("sequence-classification", ["BertForTokenClassification"], BODY),
        ("zero-shot-image-classification", ["AlignModel"], BODY),
        ("causal-lm", ["LlamaModel"], ("embed_tokens.weight", "norm.weight")),  # its head may be the input embedding
        ("causal-lm", ["BloomModel"], ("word_embeddings.weight", "ln_f.weight")),
        ("causal-lm", ["MistralForSequenceClassification"], ("model.embed_tokens.weight", "score.weight")),
        ("causal-lm", ["BertModel"], (*BODY, "cls.predictions.bias")),
        ("masked-lm", ["BertModel"], (*BODY, "cls.predictions.bias")),
        ("masked-lm", ["BartForConditionalGeneration"], BODY),
        ("sequence-classification", [], BODY),
        ("sequence-classification", "BertModel", BODY),
        ("sequence-classification", [3], BODY),
        ("sequence-classification", None, BODY),
    ],
    ids=str,
)
def test_a_model_that_may_have_a_head_is_left_to_the_executor(
    task: str, architectures: object, tensors: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", tensors[:1], tensors[1:], architectures=architectures)
    assert missing_files(ModelTable(path=model, type=task)) == []


def test_a_head_of_tokens_that_is_not_the_embedding_must_be_in_the_files(tmp_path: Path) -> None:
    tensors = ("model.embed_tokens.weight", "score.weight")
    model = write_model(
        tmp_path / "model", tensors, architectures=["MistralForSequenceClassification"], tie_word_embeddings=False
    )
    [line] = missing_files(ModelTable(path=model, type="causal-lm"))
    assert "has no head for causal-lm: its config.json names MistralForSequenceClassification" in line


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        *(("config.json", content, "not (a )?JSON.*: ") for content in (b"", b"[" * 100_000, b"[]", b"\xff")),
        ("model.safetensors", b"\xfe" * 100, "of no known kind.*"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name: str, content: bytes, fault: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", BODY, architectures=["BertModel"])
    (model / name).write_bytes(content)
    [line] = missing_files(ModelTable(path=model, type="sequence-classification"))
    assert re.fullmatch(rf"model\.path: {model}: {re.escape(name)}(: it)? is {fault}fetch it again.*", line)
