"""Batch inference on a real network: the same results as a plain transformers script, and the demos of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from support.local_demo import run_demo
from support.local_network import running
from support.task_network import Submission, TaskNetwork

from hypha_local.byte_tokenizer import add_byte_tokenizer
from hypha_local.datasets.digits import write_digits
from hypha_local.inference_demo import MODULE
from hypha_local.network_layout import process_executor

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

PLAIN: Final = Path(__file__).parent / "support" / "plain_inference.py"
QUESTIONS: Final = 100
TOKENS: Final = 12
WRITER: Final = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.5,  # texts vary, and the most likely token is clear
}  # fmt: skip


def plain(*arguments: str | Path) -> list[dict[str, Any]]:
    """Return what a script computes that imports nothing of ours."""
    command = [sys.executable, str(PLAIN), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


class InferenceNetwork(TaskNetwork):
    """A network with a trained classifier, its test images, a small language model, and questions."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, workers=2, leases=1)
        self.classifier, self.writer = root / "classifier", root / "writer"
        self.questions = self.folders.data / "questions.jsonl"
        for name in self.trainers:
            self.extend(name, process_executor("inference", "transformers", sys.executable, MODULE))
        self.serve("images", self.folders.data / "images")
        self.serve("questions", self.folders.data / "questions")

    def serve(self, name: str, path: Path) -> None:
        """Add a dataset to the data node's configuration."""
        self.extend("data", f"\n[[datasets]]\nname = {json.dumps(name)}\npath = {json.dumps(str(path))}\n")

    def _write_dataset(self) -> None:
        super()._write_dataset()
        self._write_images()
        self._train_classifier()
        rows = [{"id": number, "question": f"what is {number} times {number % 7}? "} for number in range(QUESTIONS)]
        self.questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._prepare(self.questions, "questions", 10)
        config = self.folders.root / "writer.json"
        config.write_text(json.dumps(WRITER))
        self._run("hypha-accelerate-executor", "create-model", "--config-json", str(config), "--task", "causal-lm",
                  "--out", str(self.writer))  # fmt: skip
        assert add_byte_tokenizer(self.writer)

    def _write_images(self) -> None:
        write_digits(self.folders.data / "train.safetensors", self.folders.test_set)
        self._prepare(self.folders.test_set, "images", 12)

    def _train_classifier(self) -> None:
        executor, task = "hypha-accelerate-executor", ("--task", "image-classification")
        start = str(self.folders.start_model)
        self._run(executor, "create-model", "--arch", "resnet-digits", *task, "--out", start)
        train = ("--steps", "200", "--batch-size", "16", "--threads", "1", "--learning-rate", "0.002", "--seed", "0")
        source = str(self.folders.data / "train.safetensors")
        self._run(executor, "train-alone", *task, "--model", start, "--out", str(self.classifier), *train, source)

    def _prepare(self, source: Path, name: str, slices: int) -> None:
        out = str(self.folders.data / name)
        self._run("hypha-data", "prepare", str(source), "--out", out, "--slices", str(slices))

    def slices(self, name: str) -> list[Path]:
        """Return the files of a dataset's slices in their order."""
        folder = self.folders.data / name
        return [folder / entry["file"] for entry in json.loads((folder / "manifest.json").read_text())["slices"]]

    def infer(self, dataset: str, model: Path, kind: str, inference: dict[str, Any], *columns: str) -> Submission:
        """Submit a job; return when it is accepted."""
        job: dict[str, Any] = {
            "type": "inference", "dataset": dataset, "model": {"path": str(model), "type": kind},
            "inference": inference, "results": {"columns": columns},
            "resources": {"num_workers": 2, "worker": {"cpu": 1}},
        }  # fmt: skip
        return self.submit(job)

    def generate(self, dataset: str, prompt: str) -> Submission:
        """Submit a job that continues prompts."""
        inference = {"task": "generate", "prompt": prompt, "max_new_tokens": TOKENS, "batch_size": 5}
        return self.infer(dataset, self.writer, "causal-lm", inference, "id")

    def restart_data_node(self) -> None:
        """Stop the data node and start it again, with what its configuration now has."""
        self.stop_child(self.processes.child("data"))
        self.start("data")
        self.wait_healthy("data")


def results(job: Submission) -> list[dict[str, Any]]:
    """Return the results of a job that succeeds, in the order of slices and rows."""
    folder = Path(job.wait(120)["results_dir"])
    names = [entry["file"] for entry in json.loads((folder / "manifest.json").read_text())["slices"]]
    return [json.loads(line) for name in names for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with running(InferenceNetwork(root)) as network:
        yield network


def test_images_are_classified_as_by_a_plain_script(network: InferenceNetwork) -> None:
    inference = {"task": "classify", "batch_size": 7}
    found = results(network.infer("images", network.classifier, "vision-classification", inference, "labels"))
    expected = plain("classify", network.classifier, *network.slices("images"))
    assert len(found) == len(expected) == 360
    assert [row["label"] for row in found] == [row["label"] for row in expected]
    far = [(ours, theirs) for ours, theirs in zip(found, expected, strict=True)
           if abs(ours["score"] - theirs["score"]) > 1e-5]  # fmt: skip
    assert far == []
    accuracy = sum(row["label"] == row["labels"] for row in found) / len(found)
    assert accuracy == sum(row["correct"] for row in expected) / len(expected)
    assert accuracy > 0.8, "a classifier that guesses would be no test of the labels"


def test_texts_are_those_of_a_plain_script_and_the_next_job_reads_them(network: InferenceNetwork) -> None:
    job = network.generate("questions", "{question}")
    texts = {row["id"]: row["text"] for row in results(job)}
    expected = {row["id"]: row["text"] for row in plain("generate", network.writer, network.questions, str(TOKENS))}
    assert texts.keys() == expected.keys()
    assert len(texts) == QUESTIONS
    assert sum(texts[number] == text for number, text in expected.items()) >= 0.99 * QUESTIONS
    assert len(set(texts.values())) > QUESTIONS // 4, "a model that always writes the same would be no test"
    network.serve("answers", job.directory / "results")
    network.restart_data_node()
    second = results(network.generate("answers", "{text}"))
    assert {row["id"]: row["prompt"] for row in second} == texts
    assert all(row["tokens"] == TOKENS for row in second)


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_the_inference_demo_classifies_every_image_although_a_process_is_killed(
    victim: str, network: InferenceNetwork, tmp_path: Path
) -> None:
    options = ("--task", "inference", "--model", network.classifier, "--kill", victim)
    summary, said = run_demo(tmp_path / "run", *options)
    assert "killed after 4" in said
    assert (summary["rows"], summary["errors"], summary["killed"]) == (360, 0, victim)
    assert summary["audit"].startswith("360 of 360 rows of 36 slices have exactly one result")
    expected = plain("classify", network.classifier, network.folders.test_set)
    assert summary["accuracy"] == sum(row["correct"] for row in expected) / len(expected)
    assert len(list(Path(summary["results_dir"]).glob("part-*.jsonl"))) == 36
    assert not (tmp_path / "run" / "certs").exists()


@pytest.mark.gate
def test_the_generate_demo_continues_the_prompts_of_a_file(network: InferenceNetwork, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {number}"}) + "\n" for number in range(8)))
    options = ("--task", "generate", "--model", network.writer, "--prompts", prompts, "--workers", "1")
    summary, _ = run_demo(tmp_path / "run", *options)
    assert (summary["rows"], summary["errors"], summary["accuracy"]) == (8, 0, None)
    assert [prompt.split()[0] for prompt, _ in summary["examples"]] == ["number"] * 5
    assert summary["tokens"] > 0
