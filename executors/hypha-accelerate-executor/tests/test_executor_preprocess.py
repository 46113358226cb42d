"""Preprocessors: from a slice's columns to the model's inputs; and rows of text."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from hypha.accelerate_executor import training
from hypha.accelerate_executor.data.model_inputs import ModelInputs
from hypha.accelerate_executor.data.preprocess import BatchPreprocessor, load_preprocessor
from hypha.accelerate_executor.data.row_tokenizer import RowTokenizer
from hypha.accelerate_executor.data.samples import decode_text, open_samples
from hypha.accelerate_executor.errors import DataError, JobError, ModelError
from hypha.accelerate_executor.modeling.create import create_model
from hypha.accelerate_executor.modeling.evaluation import Subject
from hypha.accelerate_executor.modeling.hf import load_model
from hypha_proto.job_spec import TextRows

pytestmark = pytest.mark.timeout(120)

WORDS = ("<unk>", "<pad>", "to", "be", "or", "not", "that", "is", "the", "question")
TEXTS = ("to be", "or not to be", "that is the question", "to be or not to be that is the question")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}


def as_bytes(texts: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """Return text as stored in slices: (samples, bytes) uint8, zero-padded."""
    rows = [text.encode() for text in texts]
    width = max(map(len, rows))
    return np.frombuffer(b"".join(row.ljust(width, b"\0") for row in rows), np.uint8).reshape(len(rows), width)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Write the files of a tokenizer with a small vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("task", ["tokenizer", "auto"])
def test_a_tokenizer_converts_bytes_to_tokens(tokenizer: Path, task: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    arrays = {"line": as_bytes(TEXTS), "labels": np.arange(4)}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, pad_token_id=1))
    made = load_preprocessor(task, tokenizer, ("line",), module)(arrays)
    assert made.keys() == {"labels", "input_ids", "attention_mask"}
    assert made["input_ids"].shape == (4, 8)  # ten words, of which the model takes eight
    assert made["input_ids"].dtype == np.int64
    assert made["input_ids"][0].tolist() == [2, 3, 1, 1, 1, 1, 1, 1]
    assert made["attention_mask"].sum(1).tolist() == [2, 4, 4, 8]
    assert made["labels"] is arrays["labels"]


def test_a_tokenizer_without_padding_pads_with_its_end_token(tokenizer: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tokenizer, pad_token=None, eos_token="question")
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    made = BatchPreprocessor("tokenizer", plain, ("text",), module)({"text": as_bytes(TEXTS[:2])})
    assert made["input_ids"].tolist() == [[2, 3, 9, 9], [4, 5, 2, 3]]
    assert made["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert module.config.pad_token_id == 9


def test_padding_is_that_of_the_model(tokenizer: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, pad_token_id=7))
    made = load_preprocessor("tokenizer", tokenizer, ("text",), module)({"text": as_bytes(TEXTS[:2])})
    assert made["input_ids"].tolist() == [[2, 3, 7, 7], [4, 5, 2, 3]]


def test_an_output_that_the_model_does_not_take_is_an_error(tokenizer: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    process = load_preprocessor("tokenizer", tokenizer, ("text",), Net())
    with pytest.raises(DataError, match="the preprocessor makes 'attention_mask', which Net does not take: use"):
        process({"text": as_bytes(TEXTS)})


def test_two_columns_are_text_and_its_pair(tokenizer: Path) -> None:
    arrays = {"question": as_bytes(("to be",) * 2), "context": as_bytes(("or", "not to be"))}
    made = load_preprocessor("tokenizer", tokenizer, ("question", "context"), None)(arrays)
    assert made["attention_mask"].sum(1).tolist() == [3, 5]


def test_padding_of_a_target_is_no_label(tokenizer: Path) -> None:
    preprocessor = load_preprocessor("tokenizer", tokenizer, ("source", "context", "target"), None)
    texts = {"source": ("a b", "a"), "context": ("b", "b"), "target": ("a b a", "b")}
    made = preprocessor({name: as_bytes(each) for name, each in texts.items()})
    alone = preprocessor({name: as_bytes(each[1:]) for name, each in texts.items()})
    assert made["labels"].shape == (2, 3)
    assert made["labels"][1].tolist() == [*alone["labels"][0], -100, -100]


def test_text_is_utf8_and_ends_at_the_zeros() -> None:
    assert decode_text(as_bytes(("žluť", "", "a"))) == ["žluť", "", "a"]


def test_a_job_with_a_tokenizer_trains_and_is_evaluated(
    make_worker: Callable[..., Any], tokenizer: Path, tmp_path: Path
) -> None:
    model, data = tmp_path / "model", tmp_path / "text.safetensors"
    create_model("causal-lm", LLAMA, 0, model)
    safetensors.numpy.save_file({"text": np.tile(as_bytes(TEXTS), (20, 1))}, data)
    worker = make_worker(rounds=3, batches=10, model_dir=model, slices=[data])
    asked: list[Any] = []
    fetching = threading.Lock()

    def fetch(body: Any) -> tuple[int, Any]:
        asked.append(body)
        if body["out_dir"] == "evaluation":
            out = worker.work_dir / body["out_dir"]
            out.mkdir(exist_ok=True)
            return 200, [worker._place(data, out / data.name, {})]
        with fetching:  # the slice is fetched beside the model
            worker.model_dir = tokenizer if body["out_dir"] == "preprocessor" else model
            return worker.fetch(body)

    worker.answers["/resources/fetch"] = fetch
    names = ["input_ids", "attention_mask", "labels"]  # as a scheduler writes its default
    uris = {name: {"type": "uri", "value": f"file:///{name}"} for name in ("model", "tokenizer", "held-out")}
    config = {
        "model": {"task": "causal-lm", "artifact": uris["model"], "input-names": names},
        "preprocessor": {"task": "tokenizer", "artifact": uris["tokenizer"], "input-names": []},
        "optimizer": {"learning-rate": 2e-2},
        "evaluation": {"data": uris["held-out"], "every": 3},
    }
    assert training.main(worker.arguments(**config)) == 0
    assert {body["value"] for body in asked if body["type"] == "uri"} == {uri["value"] for uri in uris.values()}
    losses = [each["loss"] for each in worker.metrics if "loss" in each]
    assert losses[-1] < losses[0] / 2
    assert [each["evaluation_samples"] for each in worker.metrics if "evaluation_samples" in each] == [80]


def test_a_feature_extractor_gets_audio_at_its_sampling_rate(tmp_path: Path) -> None:
    from transformers import Wav2Vec2FeatureExtractor

    Wav2Vec2FeatureExtractor(sampling_rate=8000, do_normalize=True).save_pretrained(tmp_path)
    sound = np.random.default_rng(0).normal(3.0, 2.0, (5, 400)).astype("f4")
    made = load_preprocessor("feature", tmp_path, ("audio",), None)({"audio": sound, "labels": np.zeros(5, "i8")})
    assert made["input_values"].shape == (5, 400)
    assert made["input_values"].dtype == np.float32
    np.testing.assert_allclose(made["input_values"].mean(1), 0, atol=1e-5)


def test_an_image_processor_gets_a_list_of_images_as_stored(tmp_path: Path, fake_auto_class: Any) -> None:
    def process(images: list[Any], return_tensors: str) -> dict[str, Any]:
        assert return_tensors == "np"
        assert {(image.dtype, image.shape) for image in images} == {(np.dtype("u1"), (4, 4, 3))}
        return {"pixel_values": np.stack(images).transpose(0, 3, 1, 2) / 255}

    fake_auto_class("AutoImageProcessor", lambda *_, **__: process)
    images = np.full((2, 4, 4, 3), 255, np.uint8)
    made = load_preprocessor("image", tmp_path, ("image",), None)({"image": images, "labels": np.zeros(2, "i8")})
    assert made.keys() == {"pixel_values", "labels"}
    assert made["pixel_values"].dtype == np.float32
    assert made["pixel_values"].max() == 1.0


def _images(low: float, high: float, dtype: str) -> Any:
    values = np.random.default_rng(0).random((4, 3, 8, 8)) * (high - low) + low
    return values.astype(dtype)


@pytest.fixture(scope="module")
def image_processor(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BatchPreprocessor]:
    """Return a function that loads an image processor with some settings."""
    from transformers import ViTImageProcessor

    def load(**settings: Any) -> BatchPreprocessor:
        folder = tmp_path_factory.mktemp("processor")
        ViTImageProcessor(size={"height": 8, "width": 8}, **settings).save_pretrained(folder)
        return load_preprocessor("image", folder, ("image",), None)

    return load


@pytest.mark.parametrize(("high", "dtype"), [(255, "u1"), (255, "i8"), (1, "f4"), (1, "f8"), (255.4, "f4")], ids=str)
def test_images_are_divided_by_255_once(
    image_processor: Callable[..., BatchPreprocessor], high: float, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    images = np.clip(_images(0, high, dtype), 0, 255)
    images = np.floor(images) if high > 1 else images  # transformers resizes no fractions of 255
    process = image_processor()
    black = process({"image": np.zeros_like(images)})["pixel_values"]
    assert black.mean() == -1  # tells nothing of the others
    made = [process({"image": images})["pixel_values"] for _ in range(2)]
    expected = (images / (255 if high > 1 else 1) - 0.5) / 0.5
    for found in made:
        np.testing.assert_allclose(found, expected, atol=0.01)
    said = ["column 'image' holds floats within 0 to 1: its images are not divided by 255"]
    assert [message for message in caplog.messages if "column" in message] == (said if high == 1 else [])


@pytest.mark.parametrize(
    ("settings", "images", "words"),
    [
        ({}, _images(-1, 1, "f4"), "float32 from -0.99"),  # normalised before
        ({}, _images(0, 65535, "u2"), "uint16 from 19 to 65502"),
        ({}, _images(-128, 127, "i1"), "int8 from -127 to 12"),
        ({}, _images(0, 300, "f4"), "to 29"),
        ({}, _images(0, 1, "f4") > 0.5, "bool from 0 to 1"),
        ({"do_rescale": False}, _images(0, 255, "u1"), "takes floats from 0 to 1"),
        ({"do_rescale": False}, _images(0, 255, "f4"), "takes floats from 0 to 1"),
        ({"rescale_factor": 1 / 127.5}, _images(0, 1, "f4"), "scales to another range"),
    ],
)
def test_images_that_contradict_their_processor_are_refused(
    image_processor: Callable[..., BatchPreprocessor], settings: dict[str, Any], images: Any, words: str
) -> None:
    with pytest.raises(DataError, match="column 'image' holds") as raised:
        image_processor(**settings)({"image": images})
    assert words in str(raised.value)


def test_images_beyond_the_range_of_the_first_are_refused(image_processor: Callable[..., BatchPreprocessor]) -> None:
    process = image_processor()
    mixed = np.concatenate([_images(0, 1, "f4"), _images(0, 255, "f4")])
    for _ in range(2):
        with pytest.raises(DataError, match=r"column 'image' holds float32 .* takes floats from 0 to 1"):
            process({"image": mixed})
    assert process({"image": mixed[:4]})["pixel_values"].std() == pytest.approx(0.58, abs=0.01)


def test_a_processor_that_leaves_values_alone_takes_any(image_processor: Callable[..., BatchPreprocessor]) -> None:
    from transformers import Pix2StructImageProcessor

    images = _images(0, 255, "u1")
    made = image_processor(do_rescale=False, do_normalize=False)({"image": images})["pixel_values"]
    np.testing.assert_array_equal(made, images)
    own = BatchPreprocessor(
        "image", Pix2StructImageProcessor(), ("image",), None
    )  # normalizes by the mean of each image
    assert own({"image": _images(0, 255, "u1")})["flattened_patches"].std() < 2
    means = image_processor(do_rescale=False, image_mean=[103.5, 116.0, 123.5], image_std=[1.0, 1.0, 1.0])
    np.testing.assert_allclose(means({"image": images})["pixel_values"][:, 0], images[:, 0] - 103.5, atol=1e-3)


def test_integer_sound_is_refused_by_an_extractor_of_spectrograms(tmp_path: Path) -> None:
    from transformers import ClapFeatureExtractor, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

    sound = {"audio": (np.random.default_rng(0).normal(0, 9000, (2, 400))).astype("i2")}
    for extractor in (WhisperFeatureExtractor(), ClapFeatureExtractor()):
        with pytest.raises(DataError, match=r"column 'audio' holds int16, and .* takes floats from -1 to 1"):
            BatchPreprocessor("feature", extractor, ("audio",), None)(sound)
    made = BatchPreprocessor("feature", Wav2Vec2FeatureExtractor(do_normalize=True), ("audio",), None)(sound)
    np.testing.assert_allclose(made["input_values"].std(1), 1, atol=1e-3)


def test_a_missing_library_is_named(tmp_path: Path, fake_auto_class: Any) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("\nViTImageProcessor requires the PIL library\n")

    fake_auto_class("AutoImageProcessor", missing)
    with pytest.raises(JobError, match="not installed: ViTImageProcessor requires the PIL library"):
        load_preprocessor("image", tmp_path, ("image",), None)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"other": np.zeros((2, 3), "u1")}, "lacks the tensor 'text'"),
        ({"text": np.zeros((2, 3), "f4")}, "text must be a uint8 tensor"),
        ({"text": np.zeros(2, "u1")}, "text must be a uint8 tensor"),
    ],
)
def test_columns_without_text_are_refused(tokenizer: Path, arrays: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_preprocessor("tokenizer", tokenizer, ("text",), None)(arrays)


def test_output_without_one_row_per_sample_is_refused() -> None:
    with pytest.raises(DataError, match="one row per sample"):
        BatchPreprocessor("image", lambda images, return_tensors: {"pixel_values": np.zeros(3)}, ("image",), None)(
            {"image": np.zeros((2, 4))}
        )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_nested_preprocessor_files_are_refused(tokenizer: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(tokenizer, tmp_path / "copy")
    (tmp_path / "copy" / name).write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be loaded as 'tokenizer'"):
        load_preprocessor("tokenizer", tmp_path / "copy", ("text",), None)


def test_a_preprocessor_without_input_names_is_refused(
    make_worker: Callable[..., Any], fails: Callable[..., str]
) -> None:
    job = {"task": "auto", "artifact": {"type": "uri", "value": "x"}, "input-names": []}
    assert "needs input-names" in fails(training.main, make_worker().arguments(preprocessor=job), 2)


ASKED = TextRows(prompt="what is {a} plus {b}? ", completion="{sum}")
CHAT = "{% for each in messages %}u: {{ each['content'] }}{% endfor %} r: "


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    return [{"a": n % 3, "b": n % 2, "sum": ["zero", "one", "two", "three"][n % 3 + n % 2]} for n in range(count)]


def read(path: Path) -> Any:
    samples = open_samples(path)
    return samples.read(np.arange(samples.count))


def test_the_labels_of_prompts_and_padding_are_ignored(writer: Path, words: Any, tmp_path: Path) -> None:
    rows = sums(3)
    made = RowTokenizer(words, ASKED, load_model("causal-lm", writer))(read(write_rows(tmp_path / "r.jsonl", rows)))
    for number, row in enumerate(rows):
        prompt = words(f"what is {row['a']} plus {row['b']}? ")["input_ids"]
        answer = [*words(row["sum"], add_special_tokens=False)["input_ids"], words.eos_token_id]
        length = len(prompt) + len(answer)
        padding = made["input_ids"].shape[1] - length
        assert made["input_ids"][number, :length].tolist() == prompt + answer
        assert made["labels"][number].tolist() == [-100] * len(prompt) + answer + [-100] * padding
        assert made["attention_mask"][number].tolist() == [1] * length + [0] * padding


def test_without_a_prompt_the_whole_text_is_learnt_as_far_as_the_model_takes_it(
    writer: Path, words: Any, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "r.jsonl", [{"text": "a" * 100}, {"text": "b"}])
    made = RowTokenizer(words, TextRows(completion="{text}"), load_model("causal-lm", writer))(read(path))
    assert made["input_ids"].shape == (2, 64)
    assert made["labels"][0].tolist() == words("a" * 64)["input_ids"]
    assert made["labels"][1, :3].tolist() == [*words("b")["input_ids"], words.eos_token_id, -100]


@pytest.mark.parametrize("applies", [True, False])
def test_a_prompt_is_formatted_by_the_chat_template_as_in_inference(
    writer: Path, words: Any, tmp_path: Path, applies: bool
) -> None:
    chatting = copy.copy(words)
    chatting.chat_template = CHAT
    rows = TextRows(prompt="hi {name}", completion="you", chat_template=applies)
    path = write_rows(tmp_path / "r.jsonl", [{"name": "tom"}])
    made = RowTokenizer(chatting, rows, load_model("causal-lm", writer))(read(path))
    text = "u: hi tom r: you<end>" if applies else "hi tomyou<end>"
    assert words.decode(made["input_ids"][0]) == text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": 1, "b": 2}', "there is no column 'sum', only a, b"),
        ('{"a": 1, "b": null, "sum": 3}', "column 'b' is null"),
        ("[1]", "expected an object"),
        ('{"a": 1', "not JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(writer: Path, words: Any, tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "sums-3.jsonl"
    path.write_text(json.dumps(sums(1)[0]) + f"\n{line}\n")
    tokenize = RowTokenizer(words, ASKED, load_model("causal-lm", writer))
    with pytest.raises(DataError, match=rf"sums-3\.jsonl, row 1: .*{reason}"):
        tokenize(read(path))


def test_evaluation_counts_completions_alone(writer: Path, words: Any, tmp_path: Path) -> None:
    path, module = write_rows(tmp_path / "r.jsonl", sums(5)), load_model("causal-lm", writer)
    tokenize = RowTokenizer(words, ASKED, module)
    inputs = ModelInputs("causal-lm", (), module, preprocessed=True)
    found = Subject(module, inputs, torch.device("cpu"), tokenize).measure([path], 2)
    tensors = {name: torch.from_numpy(value) for name, value in tokenize(read(path)).items()}
    with torch.inference_mode():
        expected = module.eval()(**tensors).loss
    assert found.samples == 5
    assert found.loss == pytest.approx(float(expected), rel=1e-5)


def test_a_model_learns_the_completions_of_rows(make_worker: Callable[..., Any], writer: Path, tmp_path: Path) -> None:
    slices = [write_rows(tmp_path / f"sums-{number}.jsonl", sums(48)) for number in range(2)]
    worker = make_worker(rounds=3, batches=20, slices=slices, model_dir=writer)
    artifact = {"type": "uri", "value": "file:///tokenizer"}
    config = {
        "preprocessor": {"task": "tokenizer", "artifact": artifact, "input-names": []},
        "rows": {"prompt": ASKED.prompt, "completion": ASKED.completion, "chat_template": True},
        "optimizer": {"learning-rate": 5e-3, "betas": None, "epsilon": None},
    }
    assert training.main(worker.arguments(task="causal-lm", **config)) == 0
    losses = [each["loss"] for each in worker.metrics]
    assert len(losses) == 3
    assert losses[-1] < 0.3 * losses[0]
