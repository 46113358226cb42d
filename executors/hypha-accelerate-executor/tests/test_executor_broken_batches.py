"""Rows without labels, labels and tokens that the model does not have, and gradients that are not finite."""

from __future__ import annotations

import json
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
from hypha.accelerate_executor.data.batches import Batch, Rows
from hypha.accelerate_executor.data.model_inputs import ModelInputs, check_values, value_limits
from hypha.accelerate_executor.distributed.accelerator import CpuBackend
from hypha.accelerate_executor.errors import DataError
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer
from hypha.accelerate_executor.train.trainer import Trainer
from hypha_proto.contributions import SampleRange
from hypha_proto.job_spec import Adam

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]

SMALL = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20,
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
SEGFORMER = {
    "num_encoder_blocks": 1, "depths": [1], "sr_ratios": [1], "hidden_sizes": [8], "patch_sizes": [3], "strides": [2],
    "num_attention_heads": [1], "mlp_ratios": [1], "decoder_hidden_size": 8, "num_channels": 1, "num_labels": 3,
    "classifier_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip
TOKENS = np.arange(24).reshape(4, 6) % 20
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "causal-lm": ("gpt2", {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "resid_pdrop": 0.0,
                           "embd_pdrop": 0.0, "attn_pdrop": 0.0},
                  {"input_ids": TOKENS, "labels": TOKENS}, -100),
    "masked-lm": ("bert", SMALL, {"input_ids": TOKENS, "labels": TOKENS}, -100),
    "token-classification": ("bert", SMALL, {"input_ids": TOKENS, "labels": TOKENS % 2}, -100),
    "sequence-classification": ("bert", SMALL, {"input_ids": TOKENS, "labels": np.array([0, 1, 0, 1])}, -100),
    "semantic-segmentation": ("segformer", SEGFORMER,
                              {"pixel_values": np.ones((4, 1, 8, 8), "f4"), "labels": np.ones((4, 8, 8), "i8")}, 255),
}  # fmt: skip


def trainer_of(task: str, *, micro_batch: int | None = None, max_norm: float | None = None) -> tuple[Trainer, Any]:
    """Return a trainer of a small model, and the model."""
    from transformers import AutoConfig

    from hypha.accelerate_executor.modeling.hf import auto_class

    torch.manual_seed(5)
    kind, settings, _, _ = MODELS[task]
    module = auto_class(task).from_config(AutoConfig.for_model(kind, **settings)).train()
    optimizer = InnerOptimizer(module.parameters(), Adam(learning_rate=1e-2, max_grad_norm=max_norm))
    inputs = ModelInputs(task, (), module)
    return Trainer(module, inputs, optimizer, CpuBackend(), micro_batch=micro_batch), module


def _rows(index: int, *numbers: int) -> Rows:
    return Rows(SampleRange(epoch=0, slice=index, first=0, end=len(numbers)), np.array(numbers))


def batch_of(task: str, masked: tuple[int, ...] = ()) -> Batch:
    """Return four samples, some without labels."""
    _, _, tensors, ignored = MODELS[task]
    labels = tensors["labels"].copy()
    labels[list(masked)] = ignored
    return Batch(tensors | {"labels": labels}, 4, (_rows(3, 9, 4, 7, 1),), "words")


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize("task", MODELS)
def test_a_batch_without_labels_changes_nothing(
    task: str, micro_batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    ours, module = trainer_of(task, micro_batch=micro_batch)
    theirs, plain = trainer_of(task, micro_batch=micro_batch)
    whole, none = batch_of(task), batch_of(task, (0, 1, 2, 3))
    losses = [ours.step(batch) for batch in (none, whole, none, none, whole)]
    assert [losses[0], losses[2], losses[3]] == [None] * 3
    assert [losses[1], losses[4]] == [theirs.step(whole), theirs.step(whole)]
    for name, value in module.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert caplog.messages == [
        "no sample of a batch has a label, and it is skipped, as others will be: dataset 'words', slice 3, rows 1 4 7 9"
    ]


@pytest.mark.parametrize("micro_batch", [None, 1, 3])
@pytest.mark.parametrize("task", MODELS)
def test_the_loss_of_the_other_rows_is_that_of_transformers(task: str, micro_batch: int | None) -> None:
    trainer, module = trainer_of(task, micro_batch=micro_batch)
    batch = batch_of(task, (0, 3))
    expected = module(**{name: torch.from_numpy(value) for name, value in batch.tensors.items()}).loss
    assert trainer.step(batch) == pytest.approx(float(expected.detach()), abs=1e-6)


def test_a_round_without_labels_has_no_loss_and_no_update(
    make_worker: Callable[..., Any], digits: dict[str, Any], tmp_path: Path
) -> None:
    rows = {name: np.ascontiguousarray(value[:64]) for name, value in digits["train"].items()}
    safetensors.numpy.save_file(rows | {"labels": np.full(64, -100)}, path := tmp_path / "unlabelled.safetensors")
    worker = make_worker(rounds=2, batches=3, slices=[path])
    assert training.main(worker.arguments()) == 0
    assert [(each["samples"], "loss" in each) for each in worker.metrics] == [(48, False)] * 2
    assert not any(value.any() for value in worker.update(0)[0].values())


@pytest.mark.parametrize(("masked", "labelled"), [(range(100), 260), (range(360), 0), ((), 360)])
def test_evaluation_counts_the_rows_that_have_labels(
    digit_model: Path, digits: dict[str, Any], tmp_path: Path, masked: Any, labelled: int
) -> None:
    test = {name: value.copy() for name, value in digits["test"].items()}
    test["labels"][list(masked)] = -100
    safetensors.numpy.save_file(test, path := tmp_path / "test.safetensors")
    arguments = ["evaluate", "--model", str(digit_model), "--batch-size", "50", "--data"]
    done = CliRunner().invoke(command, [*arguments, str(path)])
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert (found["samples"], found["labelled"]) == (360, labelled)
    if not labelled:
        assert found["loss"] is found["accuracy"] is None
        return
    kept = {name: np.ascontiguousarray(np.delete(value, list(masked), 0)) for name, value in test.items()}
    safetensors.numpy.save_file(kept, path)
    expected = json.loads(CliRunner().invoke(command, [*arguments, str(path)]).stdout)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["accuracy"] == pytest.approx(expected["accuracy"])


def test_a_loss_that_is_no_number_is_printed_as_null(digit_model: Path, digits: dict[str, Any], tmp_path: Path) -> None:
    rows = {name: np.ascontiguousarray(value[:8]) for name, value in digits["test"].items()}
    rows["pixel_values"] = rows["pixel_values"] * np.float32(np.nan)
    safetensors.numpy.save_file(rows, path := tmp_path / "test.safetensors")
    done = CliRunner().invoke(command, ["evaluate", "--model", str(digit_model), "--data", str(path)])
    assert json.loads(done.stdout, parse_constant=pytest.fail)["loss"] is None
    assert "the loss is nan: weights or data hold NaN" in done.stderr


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_is_named_before_it_spreads(max_norm: float | None, value: float) -> None:
    trainer, module = trainer_of("masked-lm", max_norm=max_norm)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    broken = module.bert.encoder.layer[0].output.dense.weight
    broken.register_hook(lambda gradient: torch.where(torch.arange(len(gradient))[:, None] == 3, value, gradient))
    with pytest.raises(DataError) as raised:
        trainer.step(batch_of("masked-lm"))
    text = str(raised.value)
    assert text.startswith("the gradient of 'bert.encoder.layer.0.output.dense.weight' is not finite, and the loss is ")
    assert text.endswith("lower the learning rate; dataset 'words', slice 3, rows 1 4 7 9")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_gradients_whose_norm_alone_is_too_large_are_steps_as_before(max_norm: float | None) -> None:
    trainer, module = trainer_of("masked-lm", max_norm=max_norm)
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 1e30))
    assert trainer.step(batch_of("masked-lm")) is not None


def test_a_gradient_that_is_not_finite_ends_the_job_at_once(
    make_worker: Callable[..., Any], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Trainer.loss

    def square_root_of_nothing(trainer: Trainer, given: Any) -> Any:
        found = loss(trainer, given)
        return found + (found - found.detach()).sqrt()  # finite, and its gradient is not

    monkeypatch.setattr(Trainer, "loss", square_root_of_nothing)
    worker = make_worker(rounds=2, batches=5)
    message = fails(training.main, worker.arguments(), 1)
    assert "the gradient of 'resnet." in message
    assert "slice 0, rows " in message
    assert worker.reports == []


BATCH = Batch({}, 5, (_rows(3, 7, 0), _rows(9, 4, 2, 1)), "digits")


class FakeModel(torch.nn.Module):
    """A module with the config of a model."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = type("Config", (), config)()


@pytest.mark.parametrize("value", [10, -1, 2**62])
def test_a_label_out_of_range_is_named_with_dataset_slice_row_and_column(
    make_worker: Callable[..., Any],
    digit_slices: list[Path],
    tmp_path: Path,
    fails: Callable[..., str],
    value: int,
) -> None:
    rows = {name: array.copy() for name, array in safetensors.numpy.load_file(digit_slices[1]).items()}
    rows["labels"][17] = value
    safetensors.numpy.save_file(rows, tmp_path / "wrong.safetensors")
    worker = make_worker(batches=100, slices=[digit_slices[0], tmp_path / "wrong.safetensors"])
    message = fails(training.main, worker.arguments(), 1)
    assert message.startswith(f"dataset 'digits', slice 1, row 17, column 'labels': {value} is not a label ")
    assert "takes 0 to 9, or -100 for none" in message


def test_a_token_out_of_range_is_named_with_its_position(
    make_worker: Callable[..., Any], llama: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    tokens = np.arange(32, dtype=np.int64).reshape(4, 8)
    tokens[2, 5] = 64
    safetensors.numpy.save_file({"tokens": tokens}, tmp_path / "text.safetensors")
    worker = make_worker(model_dir=llama, slices=[tmp_path / "text.safetensors"])
    message = fails(training.main, worker.arguments(task="causal-lm", inputs=["tokens"], batch_size=4), 1)
    assert message.startswith("dataset 'digits', slice 0, row 2, column 'tokens', position 5: 64 is not a token ")
    assert "takes 0 to 63;" in message


@pytest.mark.parametrize(("number", "where"), [(0, "slice 3, row 7"), (1, "slice 3, row 0"), (4, "slice 9, row 1")])
def test_the_row_is_that_of_the_slice_the_sample_comes_from(number: int, where: str) -> None:
    labels = torch.zeros(5, dtype=torch.int64)
    labels[number] = 2
    with pytest.raises(DataError, match=f"^dataset 'digits', {where}, column 'target': 2 is not a label"):
        check_values({"labels": labels}, {"labels": 2}, {"labels": "target"}, BATCH)


def test_ignored_labels_and_numbers_are_accepted() -> None:
    check_values({"labels": torch.tensor([-100, 0, 1, 1, -100])}, {"labels": 2}, {}, BATCH)
    check_values({"labels": torch.tensor([0.5, 99.0, -3.0, 0.0, 1.0])}, {"labels": 2}, {}, BATCH)
    with pytest.raises(DataError, match="-100 is not a token"):
        check_values({"input_ids": torch.full((5, 2), -100)}, {"input_ids": 2}, {}, BATCH)


@pytest.mark.parametrize(
    ("task", "config", "limits"),
    [
        ("image-classification", {"num_labels": 10, "problem_type": None}, {"labels": 10}),
        ("sequence-classification", {"num_labels": 1}, {}),  # a regression
        ("sequence-classification", {"num_labels": 3, "problem_type": "multi_label_classification"}, {}),
        ("causal-lm", {"vocab_size": 64, "num_labels": 2}, {"input_ids": 64, "labels": 64}),
        ("token-classification", {"vocab_size": 64, "num_labels": 5}, {"input_ids": 64, "labels": 5}),
        ("torch", {}, {}),
    ],
)
def test_the_limits_are_those_of_the_models_config(task: str, config: dict[str, Any], limits: dict[str, int]) -> None:
    assert value_limits(task, FakeModel(**config)) == limits
