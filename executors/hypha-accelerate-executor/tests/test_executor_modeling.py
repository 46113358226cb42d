"""Models that a job may name: loading, unpacking, refusing, sending, merging, and new heads."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner
from support.stored_model import write_model

from hypha.accelerate_executor import training
from hypha.accelerate_executor.cli import main as command
from hypha.accelerate_executor.diloco.replica import Replica
from hypha.accelerate_executor.errors import JobError, ModelError
from hypha.accelerate_executor.modeling.archive import unpacked, unpacked_files
from hypha.accelerate_executor.modeling.create import create_model, create_torch_model, read_config
from hypha.accelerate_executor.modeling.hf import load_model, model_directory
from hypha_proto.global_model import WEIGHTS, GlobalModel
from hypha_proto.job_spec import Nesterov
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_proto.weights_digest import digest_weights

pytestmark = pytest.mark.timeout(120)

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def test_tied_weights_are_sent_once_and_stay_tied(
    make_worker: Callable[..., Any], llama: Path, text_slices: list[Path]
) -> None:
    worker = make_worker(rounds=2, batches=4, model_dir=llama, slices=text_slices)
    assert training.main(worker.arguments(task="causal-lm", inputs=["input_ids", "attention_mask"])) == 0
    stored = safetensors.numpy.load_file(llama / "model.safetensors")
    assert "lm_head.weight" not in stored
    for number in range(2):
        tensors, metadata = worker.update(number)
        assert tensors.keys() == stored.keys()
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


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [*map(str, arguments)])
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


def pack(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as archive:
        archive.add(folder, folder.name)
    return target


@pytest.mark.parametrize("name", ["model.tar", "sha256-00ff", "model"])
def test_an_archive_becomes_the_directory_of_its_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "fetched").mkdir()
    archive = pack(write_model(tmp_path / "resnet"), tmp_path / "fetched" / name)
    folder = model_directory(unpacked_files([archive], is_model=True))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == [name]
    assert unpacked(folder, is_model=True) == folder


def test_several_files_and_other_files_stay(tmp_path: Path) -> None:
    model = write_model(tmp_path / "resnet")
    paths = sorted(model.iterdir())
    assert unpacked_files(paths, is_model=True) == paths
    assert unpacked_files(paths[:1], is_model=True) == paths[:1]
    assert unpacked(model, is_model=True) == model


def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    archive = pack(write_model(tmp_path / "resnet"), tmp_path / "model.tar")
    archive.write_bytes(archive.read_bytes()[:2048])
    with pytest.raises(ModelError, match=r"model\.tar cannot be unpacked: it .*(cut off|damaged)"):
        unpacked(archive, is_model=True)


def test_an_archive_of_a_process_that_was_killed_is_unpacked_by_the_next_one(tmp_path: Path) -> None:
    pack(write_model(tmp_path / "resnet"), tmp_path / ".model.tar")
    half = tmp_path / ".model.part"
    half.mkdir()
    (half / "config.json").write_text("{")
    folder = unpacked(tmp_path / "model", is_model=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "plain"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "resnet"]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_model", [False, True])
def test_what_does_not_belong_to_the_model_is_removed(tmp_path: Path, is_packed: bool, is_model: bool) -> None:
    model = write_model(tmp_path / "bert", ["a"], ["b"])
    for name in ("._model.safetensors", "adapter_config.json", "consolidated.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    write_model(model / "checkpoint-5")
    weights = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)} | {"model.safetensors.index.json"}
    folder = unpacked(pack(model, tmp_path / "model.tar") if is_packed else model, is_model=is_model)
    expected = {"config.json", "tokenizer.json"} | (weights if is_model else set())
    assert {path.name for path in folder.iterdir()} == expected


def test_a_fault_in_a_fetched_folder_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "bert")
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"bert: model\.safetensors is a Git LFS pointer"):
        unpacked(model, is_model=True)


BERT = {
    "model_type": "bert",
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}
TASK = "sequence-classification"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Write a model without a head for classification, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    create_model("masked-lm", BERT, 0, tmp_path / "trained")
    made = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "good": 2, "bad": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "trained" / "README.txt").write_text("about")
    return tmp_path / "trained"


def test_a_new_head_is_determined_by_the_seed(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="create-model --from MODEL --task sequence-classification --labels N"):
        load_model(TASK, trained)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        options = ("--task", TASK, "--labels", 3, "--seed", seed, "--out", tmp_path / name)
        assert "classifier.weight" in _run("create-model", "--from", trained, *options)
    files = [safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in "abc"]
    before = safetensors.numpy.load_file(trained / "model.safetensors")
    assert files[0]["classifier.weight"].shape == (3, 16)
    np.testing.assert_array_equal(files[0]["classifier.weight"], files[1]["classifier.weight"])
    assert (files[0]["classifier.weight"] != files[2]["classifier.weight"]).any()
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "a" / "README.txt").exists()
    word = "bert.embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(files[0][word], before[word])
    load_model(TASK, tmp_path / "a")
    again = ("--task", TASK, "--labels", 4, "--out", tmp_path / "d")
    assert "new: classifier.bias, classifier.weight" in _run("create-model", "--from", tmp_path / "a", *again)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--from", "{model}", "--task", "image-classification", "--labels", "2"), "cannot be loaded for task"),
        (("--from", "{model}/gone", "--task", "sequence-classification"), "no such folder; name that of a model"),
        (("--from", "{model}", "--task", "torch"), "task 'torch' has no heads"),
        (("--from", "{model}", "--arch", "llama-bytes"), "give either --from or a configuration"),
        (("--labels", "2", "--arch", "llama-bytes"), "--labels needs --from"),
    ],
)
def test_what_gets_no_head_is_refused(trained: Path, tmp_path: Path, options: tuple[str, ...], fault: str) -> None:
    words = [word.format(model=trained) for word in options]
    result = CliRunner().invoke(command, ["create-model", *words, "--out", str(tmp_path / "x")])
    assert result.exit_code in (1, 2)
    assert fault in result.output
    assert "Traceback" not in result.output


def test_text_is_evaluated_with_a_tokenizer(trained: Path, tmp_path: Path) -> None:
    _run("create-model", "--from", trained, "--task", TASK, "--labels", 2, "--out", tmp_path / "model")
    texts = np.frombuffer(b"good\0bad\0\0", np.uint8).reshape(2, 5)
    ids = np.array([[2], [3]])
    for name, tensors in (
        ("text", {"text": texts}),
        ("tokens", {"input_ids": ids, "attention_mask": np.ones_like(ids)}),
    ):
        (tmp_path / name).mkdir()
        for index in range(2):
            part = {key: array[index : index + 1] for key, array in tensors.items()}
            labels = np.array([index])
            safetensors.numpy.save_file({**part, "labels": labels}, tmp_path / name / f"slice-{index}.safetensors")
    measure = ("evaluate", "--task", TASK, "--model", tmp_path / "model", "--data")
    expected = json.loads(_run(*measure, tmp_path / "tokens"))
    assert expected["samples"] == 2
    assert json.loads(_run(*measure, tmp_path / "text", "--preprocessor", tmp_path / "model")) == expected
    refused = CliRunner().invoke(command, [*map(str, (*measure, tmp_path / "tokens", "--preprocessor", trained))])
    assert refused.exit_code == 1
    assert "has no tensor for --preprocessor (text, audio, image, video); leave it out" in refused.output
