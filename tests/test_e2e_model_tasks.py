"""A model of each kind of task trains two rounds on a real network, and is delivered as it was trained."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from support.local_network import LocalNetwork, running

from hypha.accelerate_executor.modeling.hf import load_model
from hypha.accelerate_executor.modeling.weight_mapping import WeightMapping

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

TASKS = {
    "vit": "image-classification",
    "wav2vec2": "audio-classification",
    "bert": "sequence-classification",
    "llama": "causal-lm",
    "mixtral": "causal-lm",
    "roberta": "masked-lm",
    "bart": "seq2-seq-lm",
}
ROWS, TOKENS, CLASSES = 160, 12, 2
IGNORED = -100
SOUND = ("input_values", "labels")


def make_samples(task: str) -> dict[str, np.ndarray]:
    """Return random samples with labels for a task."""
    chance = np.random.default_rng(0)
    classes = {"labels": chance.integers(0, CLASSES, ROWS)}
    if task == "image-classification":
        return {"pixel_values": chance.random((ROWS, 3, 32, 32), np.float32)} | classes
    if task == "audio-classification":
        return {"input_values": chance.standard_normal((ROWS, 4000), np.float32)} | classes
    tokens = chance.integers(3, 160, (ROWS, TOKENS))
    text = {"input_ids": tokens.astype(np.int32), "attention_mask": np.ones((ROWS, TOKENS), np.uint8)}
    if task == "sequence-classification":
        return text | classes
    if task == "causal-lm":
        return text
    hidden = chance.random((ROWS, TOKENS)) < (0.7 if task == "masked-lm" else 0)
    return text | {"labels": np.where(hidden, IGNORED, tokens)}


class TasksNetwork(LocalNetwork):
    """Two workers, and a small model and a dataset for each task."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, 2)
        for kind, task in TASKS.items():
            assert importlib.import_module("architectures").create(task, kind, root / kind) is None
            source = self.folders.data / f"{kind}.safetensors"
            safetensors.numpy.save_file(make_samples(task), source)
            self._run("hypha-data", "prepare", str(source), "--out", str(self.folders.data / kind), "--slices", "4")
            self.extend("data", f'\n[[datasets]]\nname = "{kind}"\npath = "../data/{kind}"\n')


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TasksNetwork]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
        with running(TasksNetwork(tmp_path_factory.mktemp("tasks") / "network")) as network:
            yield network


@pytest.mark.parametrize("kind", TASKS)
def test_model_is_delivered_as_it_was_trained(network: TasksNetwork, kind: str) -> None:
    start = network.folders.root / kind
    inputs = SOUND if kind == "wav2vec2" else ()
    rounds = {"update_rounds": 2, "avg_samples_between_updates": 48, "batch_size": 8}
    job = network.train(kind, start, TASKS[kind], inputs, **rounds)
    trained = safetensors.numpy.load_file(job.directory / "outer-state" / "round-2" / "weights.safetensors")
    delivered = load_model(TASKS[kind], job.directory / "model")
    mapping = WeightMapping(delivered, job.directory / "model")
    found = {name: values.numpy() for name, values in mapping.to_files(mapping.members)}
    assert found.keys() == trained.keys()
    before = safetensors.numpy.load_file(start / "model.safetensors")
    for name, values in trained.items():
        np.testing.assert_array_equal(found[name], values, name)
    assert any((before[name] != values).any() for name, values in trained.items())
    for name in network.trainers:
        assert "the delivered model loads with the trained weights" in network.log(name)
