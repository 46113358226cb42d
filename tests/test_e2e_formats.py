"""Sources of several formats on real processes: prepared, served, trained on and evaluated."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from support.local_network import LocalNetwork, processes_of
from tokenizers import Tokenizer, models, pre_tokenizers

from hypha_local.processes import script

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

WORDS = {"good": ("fine", "great", "lovely"), "bad": ("awful", "dull", "poor")}
FILLERS = ("a", "film", "with", "actors")
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "num_labels": 2,
}


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": None,
}


def run(program: str, *arguments: object) -> str:
    """Run a command; return what it prints."""
    words = [script(program), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_reviews(path: Path) -> None:
    pick = random.Random(0)
    with path.open("w") as file:
        file.write("review,mood\n")
        for number in range(240):
            mood = ("good", "bad")[number % 2]
            words = [*pick.sample(FILLERS, 3), pick.choice(WORDS[mood])]
            pick.shuffle(words)
            file.write(f"{' '.join(words)},{mood}\n")


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer of whole words; return how many there are."""
    words = ["[PAD]", "[UNK]", *FILLERS, *(word for group in WORDS.values() for word in group)]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return len(words)


def write_pictures(folder: Path) -> None:
    pick = random.Random(0)
    for name, low in (("dark", 0), ("light", 128)):
        (folder / name).mkdir(parents=True)
        for number in range(100):
            pixels = bytes(pick.randrange(low, low + 128) for _ in range(64))
            Image.frombytes("L", (8, 8), pixels).save(folder / name / f"{number}.png")


def write_sums(path: Path) -> None:
    numbers = ("zero", "one", "two", "three", "four")
    rows = [
        {"one": numbers[n % 3], "other": numbers[n // 3 % 3], "sum": numbers[n % 3 + n // 3 % 3]} for n in range(450)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_number_words(folder: Path) -> dict[str, int]:
    """Write a tokenizer of number words; return the settings of a model for it."""
    words = ["<pad>", "<end>", "zero", "one", "two", "three", "four", "plus", "is"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "<end>"}))
    return {"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": 1}


class FormatsNetwork(LocalNetwork):
    """A network whose data node serves a table and pictures."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, 1)
        data = self.folders.data
        write_reviews(root / "reviews.csv")
        write_pictures(root / "pictures")
        words = write_tokenizer(root / "tokenizer")
        (root / "bert.json").write_text(json.dumps(BERT | {"vocab_size": words}))
        table = ("--text", "review", "--label", "mood", "--tokenizer", root / "tokenizer", "--length", 6)
        run("hypha-data", "prepare", root / "reviews.csv", "--out", data / "reviews", *table, "--test", 0.2)
        run("hypha-data", "prepare", root / "pictures", "--out", data / "pictures", "--test", 0.2)
        model = ("--task", "sequence-classification", "--config-json", root / "bert.json", "--out", root / "bert")
        run("hypha-accelerate-executor", "create-model", *model)
        write_sums(root / "sums.jsonl")
        (root / "llama.json").write_text(json.dumps(LLAMA | write_number_words(root / "numbers")))
        run("hypha-data", "prepare", root / "sums.jsonl", "--out", data / "sums", "--test", 0.2)
        model = ("--task", "causal-lm", "--config-json", root / "llama.json", "--out", root / "llama")
        run("hypha-accelerate-executor", "create-model", *model)
        run("hypha-accelerate-executor", "create-model", "--arch", "resnet-digits", "--out", root / "resnet")
        model = ("--from", root / "resnet", "--task", "image-classification", "--labels", 2)
        run("hypha-accelerate-executor", "create-model", *model, "--out", root / "pictures-model")
        for name in ("reviews", "pictures", "sums", "sums-test"):
            self.extend("data", f'\n[[datasets]]\nname = "{name}"\npath = "../data/{name}"\n')


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FormatsNetwork]:
    root = tmp_path_factory.mktemp("formats")
    made = FormatsNetwork(root / "network")
    try:
        made.up()
        yield made
    finally:
        made.down()
    assert processes_of(root) == []


@pytest.mark.parametrize(
    ("dataset", "model", "kind"),
    [("reviews", "bert", "sequence-classification"), ("pictures", "pictures-model", "image-classification")],
)
def test_a_source_becomes_an_evaluated_model(network: FormatsNetwork, dataset: str, model: str, kind: str) -> None:
    job = network.train(dataset, network.folders.root / model, kind, update_rounds=5)
    measure = ("evaluate", "--task", kind, "--model", job.directory / "model", "--data")
    result = json.loads(run("hypha-accelerate-executor", *measure, network.folders.data / f"{dataset}-test"))
    assert result["samples"] == {"reviews": 48, "pictures": 40}[dataset]
    assert result["accuracy"] >= 0.7  # a guess is right in half of the reviews
    names = json.loads((job.directory / "model" / "config.json").read_text())["id2label"]
    assert names == {"reviews": {"0": "bad", "1": "good"}, "pictures": {"0": "dark", "1": "light"}}[dataset]


def test_a_language_model_learns_the_completions_of_json_lines(network: FormatsNetwork) -> None:
    tokenizer = json.dumps(str(network.folders.root / "numbers"))
    tables = (
        '[scheduler.job.rows]\nprompt = "{one} plus {other} is "\ncompletion = "{sum}"\n'
        f'[scheduler.job.preprocessor]\ntype = "tokenizer"\npath = {tokenizer}\n'
    )
    rounds = {"update_rounds": 8, "evaluate_every": 8}
    job = network.train(
        "sums", network.folders.root / "llama", "causal-lm", evaluation="sums-test", tables=tables, **rounds
    )
    events = [json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "round"]
    [evaluated] = [event["value"] for event in events if event.get("name") == "evaluation_loss"]
    assert len(losses) == 8
    assert losses[-1] < 0.5 * losses[0]  # the first token of the answer is one of five, the second ends it
    assert evaluated < 0.5 * losses[0]
