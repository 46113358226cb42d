"""Labels and tokens that the model does not have: the error names where they are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from hypha.accelerate_executor import training
from hypha.accelerate_executor.data.batches import Batch, Rows
from hypha.accelerate_executor.data.value_ranges import check_values, value_limits
from hypha.accelerate_executor.errors import DataError

pytestmark = pytest.mark.timeout(120)

BATCH = Batch({}, 5, {}, (Rows("3", np.array([7, 0])), Rows("9", np.array([4, 2, 1]))), "digits")


class FakeModel(torch.nn.Module):
    """A module with the config of a model."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = type("Config", (), config)()


def error(caplog: pytest.LogCaptureFixture, arguments: list[str]) -> str:
    assert training.main(arguments) == 1
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    return record.getMessage()


@pytest.mark.parametrize("value", [10, -1, 2**62])
def test_a_label_out_of_range_is_named_with_dataset_slice_row_and_column(
    make_worker: Callable[..., Any],
    digit_slices: list[Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    value: int,
) -> None:
    rows = {name: array.copy() for name, array in safetensors.numpy.load_file(digit_slices[1]).items()}
    rows["labels"][17] = value
    safetensors.numpy.save_file(rows, tmp_path / "wrong.safetensors")
    worker = make_worker(batches=100, slices=[digit_slices[0], tmp_path / "wrong.safetensors"])
    message = error(caplog, worker.arguments())
    assert message.startswith(f"dataset 'digits', slice 1, row 17, column 'labels': {value} is not a label ")
    assert "takes 0 to 9, or -100 for none" in message


def test_a_token_out_of_range_is_named_with_its_position(
    make_worker: Callable[..., Any], llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = np.arange(32, dtype=np.int64).reshape(4, 8)
    tokens[2, 5] = 64
    safetensors.numpy.save_file({"tokens": tokens}, tmp_path / "text.safetensors")
    worker = make_worker(model_dir=llama, slices=[tmp_path / "text.safetensors"])
    model = {
        "task": "causal-lm",
        "artifact": {"type": "uri", "value": "file:///model"},
        "input-names": ["tokens"],
    }
    message = error(caplog, worker.arguments(model=model, batch_size=4))
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
