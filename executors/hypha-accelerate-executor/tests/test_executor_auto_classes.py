"""Every task loads the right Auto class of transformers, or a class of the owner, from the files that it reads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch
import transformers
import transformers.utils as names
from click.testing import CliRunner
from support.stored_model import write_model

from hypha.accelerate_executor import training
from hypha.accelerate_executor.cli import main as command
from hypha.accelerate_executor.data.preprocess import load_preprocessor
from hypha.accelerate_executor.errors import ExecutorError, JobError, ModelError
from hypha.accelerate_executor.modeling.hf import load_model
from hypha_proto.job_spec import PREPROCESSOR_TASKS, TASKS
from hypha_proto.model_listing import (
    ADAPTER,
    CONFIG,
    INDEX,
    WEIGHTS,
    list_companions,
    list_weights,
    names_in,
    reader_of,
)
from hypha_proto.update_file import apply_update_to_dir

# written out, to catch errors in the rule that derives class names
CLASSES = {
    "auto": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2-seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "next-sentence-prediction": "AutoModelForNextSentencePrediction",
    "masked-generation": "AutoModelForMaskGeneration",
    "image-segmentation": "AutoModelForImageSegmentation",
    "semantic-segmentation": "AutoModelForSemanticSegmentation",
    "instance-segmentation": "AutoModelForInstanceSegmentation",
    "universal-segmentation": "AutoModelForUniversalSegmentation",
    "object-detection": "AutoModelForObjectDetection",
    "zero-shot-object-detection": "AutoModelForZeroShotObjectDetection",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
    "depth-estimation": "AutoModelForDepthEstimation",
    "keypoint-detection": "AutoModelForKeypointDetection",
    "keypoint-matching": "AutoModelForKeypointMatching",
    "mask-generation": "AutoModelForMaskGeneration",
    "masked-image-modeling": "AutoModelForMaskedImageModeling",
    "image-to-image": "AutoModelForImageToImage",
    "image-text-to-text": "AutoModelForImageTextToText",
    "video-classification": "AutoModelForVideoClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "audio-frame-classification": "AutoModelForAudioFrameClassification",
    "audio-tokenization": "AutoModelForAudioTokenization",
    "audio-x-vector": "AutoModelForAudioXVector",
    "ctc": "AutoModelForCTC",
    "speech-seq2-seq": "AutoModelForSpeechSeq2Seq",
    "text-to-spectrogram": "AutoModelForTextToSpectrogram",
    "text-to-waveform": "AutoModelForTextToWaveform",
    "document-question-answering": "AutoModelForDocumentQuestionAnswering",
    "table-question-answering": "AutoModelForTableQuestionAnswering",
    "visual-question-answering": "AutoModelForVisualQuestionAnswering",
    "vision2-seq": "AutoModelForImageTextToText",
    "text-encoding": "AutoModelForTextEncoding",
    "time-series-prediction": "AutoModelForTimeSeriesPrediction",
    "backbone": "AutoBackbone",
    "pre-training": "AutoModelForPreTraining",
}


AUTO_CLASSES = {
    "auto": "AutoProcessor",
    "tokenizer": "AutoTokenizer",
    "feature": "AutoFeatureExtractor",
    "image": "AutoImageProcessor",
    "video": "AutoVideoProcessor",
}


class _AskedError(Exception):
    """The class was requested."""


@pytest.mark.parametrize("task", [task for task in TASKS if task != "torch"])
def test_a_task_loads_its_auto_class(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    asked: list[tuple[Any, ...]] = []

    def from_pretrained(folder: Path, **options: Any) -> Any:
        asked.append((folder, options["trust_remote_code"], options["use_safetensors"]))
        raise _AskedError

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(getattr(transformers, CLASSES[task]), "from_pretrained", from_pretrained)
    with pytest.raises(_AskedError):
        load_model(task, tmp_path)
    assert asked == [(tmp_path, False, True)]


def test_the_torch_task_loads_a_class_of_the_owner(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"torch_class": "owners:Net"}')
    with pytest.raises(JobError, match="--allow-module owners"):
        load_model("torch", tmp_path)


@pytest.mark.parametrize("task", PREPROCESSOR_TASKS)
def test_a_preprocessor_loads_its_auto_class(task: str, tmp_path: Path, fake_auto_class: Any) -> None:
    asked: list[Any] = []

    def from_pretrained(folder: Path, **options: Any) -> Any:
        asked.append(options["trust_remote_code"])
        raise OSError("no such file")

    fake_auto_class(AUTO_CLASSES[task], from_pretrained)  # image classes are missing without Pillow or torchvision
    with pytest.raises(ModelError, match=task):
        load_preprocessor(task, tmp_path, ("x",), None)
    assert asked == [False]


LIBRARY = Path(transformers.__file__).parent
OTHERS = {INDEX, ADAPTER, "pytorch_model.bin.index.json"}
"""Names of files that belong to no tokenizer, processor or configuration."""


def names_in_library() -> set[str]:
    """Return the names of all tokenizers' files, and of the files of which a constant has the name."""
    found: set[str] = set()
    for path in LIBRARY.glob("models/*/tokenization_*.py"):
        for table in re.findall(r"VOCAB_FILES_NAMES = \{([^}]*)\}", path.read_text()):
            found |= set(re.findall(r':\s*"([^"]+)"', table))
    for path in (
        *LIBRARY.glob("tokenization_*.py"),
        *LIBRARY.glob("utils/*.py"),
        *LIBRARY.glob("integrations/**/*.py"),
    ):
        found |= set(re.findall(r'^[A-Z_]+_(?:FILE|NAME) = "(\w+\.\w+)"$', path.read_text(), re.MULTILINE))
    return {name for name in found if not name.endswith((".bin", ".safetensors", ".py", ".md"))} - OTHERS


def test_files_that_the_library_reads_belong_to_a_model() -> None:
    found = names_in_library()
    assert len(found) > 30
    assert {"vocab.json", "sentencepiece.bpe.model", "source.spm", "bpe.codes", "tekken.json", "chat_template.jinja",
            "preprocessor_config.json", "generation_config.json"} <= found  # fmt: skip
    assert found - set(list_companions(found)) == set()
    assert (names.SAFE_WEIGHTS_NAME, names.SAFE_WEIGHTS_INDEX_NAME, names.CONFIG_NAME) == (WEIGHTS, INDEX, CONFIG)


@pytest.mark.parametrize("is_whole", [False, True])
def test_weights_are_those_that_the_library_would_load(is_whole: bool, tmp_path: Path) -> None:
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    write_model(tmp_path, ["a"], ["b"])
    if is_whole:
        write_model(tmp_path)
    loaded, _ = _get_resolved_checkpoint_files(
        str(tmp_path), variant=None, gguf_file=None, use_safetensors=True, user_agent=None, is_remote_code=False
    )
    assert [Path(path).name for path in loaded or ()] == list_weights(names_in(tmp_path), reader_of(tmp_path))


OWNERS_MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=16, tied=False):
        super().__init__()
        self.inner = torch.nn.Linear(64, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.outer = torch.nn.Linear(width, 10)
        if tied:
            self.again = self.outer

    def forward(self, pixel_values, labels, scale=None):
        x = torch.relu(self.norm(self.inner(pixel_values.flatten(1))))
        return torch.nn.functional.cross_entropy(self.outer(x), labels)

class WithoutLoss(Net):
    def forward(self, pixel_values):
        return self.inner(pixel_values.flatten(1))

class WithDict(Net):
    def forward(self, image, target):
        return {"loss": super().forward(image, target)}

NOT_A_CLASS = 3
"""


@pytest.fixture
def owners_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install a module of the worker's owner."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "owners_nets.py").write_text(OWNERS_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    yield "owners_nets"
    sys.modules.pop("owners_nets", None)


def _create(out: Path, name: str, *options: str) -> Path:
    arguments = ["create-model", "--task", "torch", "--torch-class", name, "--out", str(out), *options]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "inputs"), [("Net", ()), ("WithDict", ("pixel_values", "labels"))])
def test_a_class_of_the_owner_trains(
    owners_module: str, make_worker: Callable[..., Any], tmp_path: Path, digits: Any, name: str, inputs: tuple[str, ...]
) -> None:
    start = _create(tmp_path / "model", f"{owners_module}:{name}", "--kwargs", '{"width": 24}')
    worker = make_worker(rounds=3, batches=25, model_dir=start)
    allowed = ["--allow-module", "other", "--allow-module", owners_module]
    assert training.main([*worker.arguments(task="torch", inputs=inputs), *allowed]) == 0
    tensors, metadata = worker.update(0)
    assert tensors.keys() == safetensors.numpy.load_file(start / "model.safetensors").keys()
    assert tensors["inner.weight"].shape == (24, 64)
    assert metadata.statistics == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    losses = [each["loss"] for each in worker.metrics]
    assert losses[-1] < 0.8 * losses[0]
    for outer in worker.outers:
        apply_update_to_dir(start, outer)
    if name == "Net":
        test = tmp_path / "test.safetensors"
        safetensors.numpy.save_file(digits["test"], test)
        options = ["--task", "torch", "--model", str(start), "--data", str(test), "--allow-module", owners_module]
        result = json.loads(CliRunner().invoke(command, ["evaluate", *options]).stdout)
        assert result["loss"] < 1.5
        assert result["accuracy"] is None


def test_a_module_that_the_owner_has_not_allowed_is_refused(
    owners_module: str, make_worker: Callable[..., Any], tmp_path: Path, fails: Callable[..., str]
) -> None:
    start = _create(tmp_path / "model", f"{owners_module}:Net")
    sys.modules.pop(owners_module)
    worker = make_worker(model_dir=start)
    said = fails(training.main, [*worker.arguments(task="torch"), "--allow-module", "owners"], 2)
    assert f"--allow-module {owners_module}" in said
    assert owners_module not in sys.modules


def test_a_file_of_the_job_is_not_importable(
    make_worker: Callable[..., Any], tmp_path: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"torch_class": "jobs_own:Net"}')
    worker = make_worker(model_dir=model)
    (worker.work_dir / "jobs_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(worker.work_dir))  # as `python -m` does with the current directory
    arguments = [*worker.arguments(task="torch"), "--allow-module", "jobs_own"]
    assert "cannot be imported" in fails(training.main, arguments, 2)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({"torch_class": "owners_nets.Net"}, JobError, "module:Class"),
        ({"torch_class": "owners_nets:Missing"}, JobError, "has no 'Missing'"),
        ({"torch_class": "owners_nets:NOT_A_CLASS"}, JobError, "not a subclass of torch"),
        ({"torch_class": "owners_nets:Net", "kwargs": {"depth": 2}}, ModelError, "depth"),
        ({"torch_class": "owners_nets:Net", "kwargs": {"width": 8}}, ModelError, "inner.weight"),
        ({"torch_class": "os:system", "kwargs": {"command": "false"}}, JobError, "'os' is not allowed"),
        ({"torch_class": 5}, ModelError, "torch_class"),
        ([], ModelError, "torch_class"),
        ("[" * 100_000, ModelError, "config.json cannot be read: nested more than 64 levels deep"),
        ('{"torch_class": "owners_nets:Net", "kwargs": ' + "[" * 900 + "]" * 900 + "}", ModelError, "nested"),
    ],
)
def test_an_invalid_model_config_is_refused(
    owners_module: str, tmp_path: Path, config: Any, kind: type[ExecutorError], words: str
) -> None:
    model = _create(tmp_path / "model", f"{owners_module}:Net")
    (model / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(kind, match=words):
        load_model("torch", model, allowed={owners_module})


def test_missing_tensors_are_refused_and_tied_ones_are_loaded(owners_module: str, tmp_path: Path) -> None:
    model = _create(tmp_path / "tied", f"{owners_module}:Net", "--kwargs", '{"tied": true}')
    stored = safetensors.numpy.load_file(model / "model.safetensors")
    assert ("outer.weight" in stored) != ("again.weight" in stored)
    module = load_model("torch", model, allowed={owners_module})
    assert module.get_parameter("outer.weight") is module.get_parameter("again.weight")
    del stored["inner.bias"]
    safetensors.numpy.save_file(stored, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack the tensor 'inner\.bias'"):
        load_model("torch", model, allowed={owners_module})
    safetensors.numpy.save_file({**stored, "inner.bias": stored["norm.bias"], "more": stored["norm.bias"]},
                                model / "model.safetensors")  # fmt: skip
    with pytest.raises(ModelError, match="unknown 'more'"):
        load_model("torch", model, allowed={owners_module})


def test_pickled_weights_of_a_torch_model_are_not_loaded(owners_module: str, tmp_path: Path) -> None:
    model = _create(tmp_path / "model", f"{owners_module}:Net")
    torch.save(load_model("torch", model, allowed={owners_module}).state_dict(), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        load_model("torch", model, allowed={owners_module})


def test_a_model_without_a_loss_is_refused(
    owners_module: str, make_worker: Callable[..., Any], tmp_path: Path, fails: Callable[..., str]
) -> None:
    worker = make_worker(model_dir=_create(tmp_path / "model", f"{owners_module}:WithoutLoss"))
    arguments = [*worker.arguments(task="torch"), "--allow-module", owners_module]
    assert "returns no loss" in fails(training.main, arguments, 1)


def test_create_model_reports_errors(owners_module: str, tmp_path: Path) -> None:
    for options, words in (
        (["--torch-class", f"{owners_module}:Net", "--kwargs", "[1]"], "JSON object"),
        (["--torch-class", f"{owners_module}:Net", "--kwargs", "x"], "not JSON"),
        (["--torch-class", "no_such_module:Net"], "cannot be imported"),
    ):
        result = CliRunner().invoke(command, ["create-model", *options, "--out", str(tmp_path / "new")])
        assert result.exit_code == 1
        assert words in result.output


def test_a_configuration_of_a_torch_model_names_an_allowed_module(owners_module: str, tmp_path: Path) -> None:
    first = _create(tmp_path / "first", f"{owners_module}:Net", "--kwargs", '{"tied": true}', "--seed", "3")
    options = ["create-model", "--task", "torch", "--config-json", str(first / "config.json"), "--seed", "3"]
    result = CliRunner().invoke(command, [*options, "--out", str(tmp_path / "no")])
    assert result.exit_code == 1
    assert f"module '{owners_module}' is not allowed; name it in --allow-module" in result.output
    allowed = [*options, "--allow-module", owners_module, "--out", str(tmp_path / "again")]
    assert CliRunner().invoke(command, allowed).exit_code == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (first / name).read_bytes()
