"""Models that a job may name: loading, refusing, sending and merging."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner

from hypha.accelerate_executor import training
from hypha.accelerate_executor.cli import main as command
from hypha.accelerate_executor.diloco.replica import Replica
from hypha.accelerate_executor.errors import JobError, ModelError
from hypha.accelerate_executor.modeling.create import create_model, create_torch_model, read_config
from hypha.accelerate_executor.modeling.hf import load_model
from hypha_proto.global_model import WEIGHTS, GlobalModel
from hypha_proto.job_spec import Nesterov
from hypha_proto.update_file import (
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    UpdateMetadata,
    open_update,
    write_update,
)
from hypha_proto.weights_digest import digest_weights

pytestmark = pytest.mark.timeout(120)

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def test_tied_weights_are_sent_once_and_stay_tied(make_worker: Callable[..., Any], llama: Path, tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    text = tmp_path / "text.safetensors"
    tokens = chance.integers(0, 64, (40, 12))
    mask = np.ones((40, 12), "i8")
    mask[:, 9:] = 0
    safetensors.numpy.save_file({"input_ids": tokens.astype("i4"), "attention_mask": mask}, text)
    worker = make_worker(rounds=2, batches=4, model_dir=llama, slices=[text])
    artifact = {"type": "uri", "value": "x"}
    model = {"task": "causal-lm", "artifact": artifact, "input-names": ["input_ids", "attention_mask"]}
    assert training.main(worker.arguments(model=model)) == 0
    stored = safetensors.numpy.load_file(llama / "model.safetensors")
    assert "lm_head.weight" not in stored
    for path in worker.updates:
        file, metadata = open_update(path)
        with file:
            assert file.tensors.keys() == stored.keys()
        assert metadata.statistics == frozenset()
    module = load_model("causal-lm", llama)
    assert module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight")
    Replica(module, llama).merge(worker.outers[0])
    assert module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight")


def _stored_as(model: Path, dtype: str, out: Path) -> Path:
    """Copy a model with its float tensors stored as `dtype`."""
    out.mkdir()
    (out / "config.json").write_bytes((model / "config.json").read_bytes())
    with TensorFile(model / "model.safetensors") as file:
        infos = {n: TensorInfo(dtype, i.shape) if i.dtype == "F32" else i for n, i in file.tensors.items()}
        with TensorFileWriter(out / "model.safetensors", infos, file.metadata) as writer:
            for name in infos:
                writer.write(name, file.tensor(name))
    return out


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_executors_and_the_schedulers_weights_stay_bit_identical(digit_model: Path, tmp_path: Path, dtype: str) -> None:
    folder = _stored_as(digit_model, dtype, tmp_path / "model")
    module = load_model("image-classification", folder)
    replica = Replica(module, folder)
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    copy = GlobalModel(folder, tmp_path / "outer-state", Nesterov(learning_rate=0.7, momentum=0.9))
    chance = np.random.default_rng(0)
    path = tmp_path / "outer.safetensors"
    for number, count in enumerate((3.4, 2.5, 2.5, 1.5), 1):  # the mean of counts over workers is not an integer
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(7.0)  # this worker's local changes are replaced by the global weights
        change = {name: chance.normal(0, 1e-3, tuple(start[name].shape)).astype("f4") for name in replica.names}
        change = {name: np.float32(count) if name.endswith("tracked") else value for name, value in change.items()}
        write_update(path, {name: np.shape(value) for name, value in change.items()}, change.items(), UpdateMetadata())
        replica.merge(path)
        state = copy.add(path, number)
        assert state.weights == digest_weights(
            (name, value.detach().numpy()) for name, value in replica.members.items()
        )
    after = module.state_dict()
    with TensorFile(copy.directory(4) / WEIGHTS) as file:
        assert file.tensors.keys() == replica.names
        for name in file.tensors:
            assert np.array_equal(after[name].numpy(), file.stored(name)), name
    assert {int(value) for name, value in after.items() if name.endswith("tracked")} == {10}
    shutil.copytree(folder, tmp_path / "result")
    copy.write_model(4, tmp_path / "result")
    for name, value in load_model("image-classification", tmp_path / "result").state_dict().items():
        assert torch.equal(value, after[name].to(TORCH_DTYPES[dtype]).to(value.dtype)), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors | {"extra": np.zeros(1, "f4")}, "unknown tensor 'extra'"),
        (lambda tensors: dict(list(tensors.items())[1:]), "lacks the tensor"),
        (lambda tensors: tensors | {"classifier.1.bias": np.zeros(11, "f4")}, "shape"),
        (lambda tensors: tensors | {"classifier.1.bias": np.full(10, np.nan, "f4")}, "NaN"),
    ],
)
def test_a_mismatched_update_changes_nothing(
    digit_model: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    module = load_model("image-classification", digit_model)
    replica = Replica(module, digit_model)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tensors = change({name: np.ones(tuple(before[name].shape), "f4") for name in sorted(replica.names)})
    path = tmp_path / "outer.safetensors"
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(ModelError, match=words):
        replica.merge(path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("content", ["[" * 100_000, '{"model_type": "llama", "a": ' + "[" * 900 + "]" * 900 + "}"])
def test_a_nested_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match="the model cannot be loaded"):
        load_model("causal-lm", tmp_path)
    with pytest.raises(JobError, match="nested more than 64 levels deep"):
        read_config(None, tmp_path / "config.json")
    with pytest.raises(JobError, match="nested more than 64 levels deep"):
        create_torch_model("module:Class", content, 0, tmp_path / "new")


def test_a_model_without_its_head_is_refused(llama: Path, tmp_path: Path) -> None:
    # a missing head would be initialised differently on every worker
    config = json.loads((llama / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_model("causal-lm", tmp_path)


def test_pickled_weights_are_not_loaded(digit_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((digit_model / "config.json").read_bytes())
    module = load_model("image-classification", digit_model)
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model("image-classification", tmp_path)


def test_the_models_own_code_is_not_run(digit_model: Path, tmp_path: Path) -> None:
    config = json.loads((digit_model / "config.json").read_text())
    del config["model_type"]
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForImageClassification": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "model.safetensors").write_bytes((digit_model / "model.safetensors").read_bytes())
    with pytest.raises(ModelError):
        load_model("image-classification", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_half_precision_model_trains_in_float32(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(llama).to(torch.bfloat16).save_pretrained(tmp_path)
    module = load_model("causal-lm", tmp_path)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_create_model_is_determined_by_the_seed(tmp_path: Path) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        _run("create-model", "--arch", "resnet-digits", "--seed", seed, "--out", str(tmp_path / name))
    contents = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]
    again = CliRunner().invoke(command, ["create-model", "--arch", "resnet-digits", "--out", str(tmp_path / "a")])
    assert again.exit_code == 1
    assert "not an empty directory" in again.output


def test_create_model_from_a_configuration(llama_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_text(json.dumps(llama_config))
    config = str(tmp_path / "llama.json")
    out = _run("create-model", "--task", "causal-lm", "--config-json", config, "--out", str(tmp_path / "m"))
    assert "parameters" in out
    for arguments in (["--arch", "none"], [], ["--arch", "resnet-digits", "--config-json", config]):
        result = CliRunner().invoke(command, ["create-model", *arguments, "--out", str(tmp_path / "n")])
        assert result.exit_code == 1
        assert "Traceback" not in result.output
    with pytest.raises(JobError, match="causal-lm"):
        create_model("causal-lm", {"model_type": "resnet"}, 0, tmp_path / "n")


def test_evaluate_agrees_with_plain_transformers(
    make_worker: Callable[..., Any], tmp_path: Path, digits: dict[str, Any]
) -> None:
    from transformers import AutoModelForImageClassification

    test = tmp_path / "test.safetensors"
    safetensors.numpy.save_file(digits["test"], test)
    worker = make_worker()
    model = AutoModelForImageClassification.from_pretrained(worker.model_dir).eval()
    images, labels = (torch.from_numpy(digits["test"][name]) for name in ("pixel_values", "labels"))
    with torch.no_grad():
        expected = (model(pixel_values=images).logits.argmax(-1) == labels).sum().item() / len(labels)
        loss = float(model(pixel_values=images, labels=labels).loss)
    for size in ("360", "7"):
        out = _run("evaluate", "--model", str(worker.model_dir), "--data", str(test), "--batch-size", size)
        result = json.loads(out)
        assert result["accuracy"] == expected
        assert result["samples"] == 360
        assert result["loss"] == pytest.approx(loss, rel=1e-5)


def test_evaluate_reports_language_model_loss_in_nats(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = np.random.default_rng(0).integers(0, 64, (10, 12))
    test = tmp_path / "test.safetensors"
    safetensors.numpy.save_file({"input_ids": tokens}, test)
    result = json.loads(_run("evaluate", "--task", "causal-lm", "--model", str(llama), "--data", str(test)))
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(llama).eval()(input_ids=ids, labels=ids)
    assert result["loss"] == pytest.approx(float(expected.loss), rel=1e-5)
    right = (expected.logits[:, :-1].argmax(-1) == ids[:, 1:]).sum().item()
    assert result["accuracy"] == right / (10 * 11)


def test_evaluate_reports_errors(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 20)
    for task, words in (("causal-lm", "--data"), ("depth-estimation", "accuracy")):
        arguments = ["evaluate", "--task", task, "--model", str(llama), "--data", str(tmp_path / "bad.safetensors")]
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == 1
        assert words in result.output


def test_an_adapter_in_the_folder_is_not_applied_where_peft_is_installed(
    digit_model: Path, digits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import import_utils

    from hypha.accelerate_executor.modeling.evaluation import evaluate

    model, data = tmp_path / "model", tmp_path / "data.safetensors"
    shutil.copytree(digit_model, model)
    safetensors.numpy.save_file({name: value[:20] for name, value in digits["test"].items()}, data)
    expected = evaluate("image-classification", model, data, 20)
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    (tmp_path / "peft.py").write_text("raise AssertionError('peft is imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_utils.is_peft_available.cache_clear()
    try:
        assert evaluate("image-classification", model, data, 20) == expected
    finally:
        import_utils.is_peft_available.cache_clear()
