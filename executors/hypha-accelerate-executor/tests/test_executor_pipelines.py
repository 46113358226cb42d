"""Results of inference tasks, compared row by row with those of `transformers.pipeline`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.numpy
import torch

from hypha.accelerate_executor import inference

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]

LETTERS: Final = [*"abcdefghijklmnopqrstuvwxyz0123456789.,:!?", "\u0120", "<pad>", "<end>", "<unk>", "<cls>", "<sep>"]
PAD, END, CLS, SEP = (LETTERS.index(name) for name in ("<pad>", "<end>", "<cls>", "<sep>"))
SMALL: Final = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 40, "initializer_range": 0.4, "num_labels": 3,
    "pad_token_id": PAD, "bos_token_id": CLS, "eos_token_id": END, "attention_dropout": 0.0,
}  # fmt: skip
TEXTS: Final = ("a b", "what?", "some more words, 7", "x", "y z!", "the 9 seas: a, b", "ab", "0")
PAIRS: Final = ("cd", "why not?", "x", "more words", "u", "z", "q r s", "!")


def _tokenizer(*, framed: bool = True, types: bool = False, **settings: Any) -> Any:
    """Create a tokenizer of letters, with or without special tokens around texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if framed:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<cls> $A <sep>",
            pair="<cls> $A <sep> $B:1 <sep>:1",
            special_tokens=[("<cls>", CLS), ("<sep>", SEP)],
        )
    names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    usual = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>", "model_input_names": names}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(usual | settings))


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model with random weights and its tokenizer or processor."""

    def make(auto: str, kind: str, processor: Any, **settings: Any) -> Path:
        import transformers

        torch.manual_seed(5)
        given = {key: each for key, each in settings.items() if each is not None}
        config = transformers.AutoConfig.for_model(kind, **given)
        model = getattr(transformers, auto).from_config(config).eval()
        path = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(path)
        if processor is not None:
            processor.save_pretrained(path)
        return path

    return make


@pytest.fixture
def make_worker_of(make_task_worker: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Return a function that starts a worker with a model and one slice: a file, or rows to be written to one."""

    def make(model: Path, rows: Path | Sequence[Any], settings: dict[str, Any]) -> Any:
        path = rows if isinstance(rows, Path) else tmp_path / "slice.jsonl"
        if not isinstance(rows, Path):
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return make_task_worker(model, [path], settings)

    return make


def _every_night(cases: Mapping[str, Any], everyday: Sequence[str]) -> list[Any]:
    """Return the names of cases as parameters; those that are not for every day are nightly."""
    return [pytest.param(name, marks=[] if name in everyday else pytest.mark.nightly) for name in cases]


def _settings(kind: str, preprocessor: str | None, **more: Any) -> dict[str, Any]:
    return {
        "task": "classify", "type": kind, "preprocessor": preprocessor, "columns": ["scores"],
        "inference": {"batch_size": 4},
    } | more  # fmt: skip


def _compare(found: Sequence[Mapping[str, Any]], expected: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Compare results with those of a pipeline that returns all classes."""
    assert [row.get("error") for row in found] == [None] * len(expected)
    scores = [[each["score"] for each in sorted(row, key=lambda each: each["label"])] for row in expected]
    np.testing.assert_allclose([row["scores"] for row in found], scores, atol=2e-5, rtol=1e-4)
    assert [f"LABEL_{row['label']}" for row in found] == [row[0]["label"] for row in expected]
    np.testing.assert_allclose([row["score"] for row in found], [row[0]["score"] for row in expected], atol=2e-5)
    assert np.ptp(np.asarray(scores), axis=0).max() > 1e-3, "the rows should differ"


# ---------------------------------------------------------------------------------------------------------------- text

GPT2: Final = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80}
T5: Final = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}
BART: Final = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.4, "eos_token_id": SEP, "decoder_start_token_id": SEP,
}  # fmt: skip
XLNET: Final = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "max_position_embeddings": None}
XLM: Final = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 80}
OPT: Final = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 80}
CTRL: Final = {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 80}
NEO: Final = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
CLASSIFIERS: Final[Mapping[str, dict[str, Any]]] = {
    "bert": {}, "bert/one": {"num_labels": 1}, "bert/multi": {"problem_type": "multi_label_classification"},
    "bert/regression": {"problem_type": "regression", "num_labels": 2}, "roberta": {"pad_token_id": 3},
    "xlm-roberta": {"pad_token_id": 1}, "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "deberta": {}, "electra": {},
    "albert": {"embedding_size": 16}, "mpnet": {"pad_token_id": 1}, "xlnet": XLNET, "gpt2": GPT2,
    "gpt2/unnamed": GPT2 | {"pad_token_id": None}, "gpt2/other": GPT2 | {"pad_token_id": 4}, "openai-gpt": GPT2,
    "llama": {}, "llama/unnamed": {"pad_token_id": None}, "mistral": {}, "qwen2": {}, "gemma2": {}, "phi3": {},
    "mixtral": {"num_local_experts": 4}, "opt": OPT, "bloom": {"n_layer": 2, "n_head": 4}, "bart": BART, "mbart": BART,
    "t5": T5 | {"eos_token_id": SEP}, "xlm": XLM, "flaubert": XLM,
    "longformer": {"attention_window": 8, "pad_token_id": 1},
    "big_bird": {}, "convbert": {"embedding_size": 32}, "squeezebert": {"embedding_size": 32}, "fnet": {},
    "modernbert": {"cls_token_id": CLS, "sep_token_id": SEP, "global_attn_every_n_layers": 2}, "nystromformer": {},
    "mobilebert": {}, "rembert": {}, "ctrl": CTRL, "persimmon": {}, "gptj": GPT2 | {"rotary_dim": 4}, "gpt_neo": NEO,
    "ernie": {}, "esm": {"pad_token_id": 1}, "roformer": {}, "layoutlm": {}, "biogpt": {}, "jamba": {}, "qwen3": {},
}  # fmt: skip
EVERY_DAY: Final = ("bert/one", "bert/multi", "bert/regression", "xlnet", "gpt2/unnamed", "gpt2/other")


@pytest.mark.parametrize("name", _every_night(CLASSIFIERS, EVERY_DAY))
def test_classes_of_text_equal_those_of_the_pipeline(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any], name: str
) -> None:
    from transformers import pipeline

    settings = SMALL | CLASSIFIERS[name]
    padding = {"pad_token": None} if name == "gpt2/unnamed" else {}
    tokenizer = _tokenizer(framed="gpt" not in name, **padding)
    model = make_model("AutoModelForSequenceClassification", name.partition("/")[0], tokenizer, **settings)
    classify = pipeline("text-classification", model=str(model))
    expected = [classify(text, top_k=None) for text in TEXTS]
    rows = [{"text": text} for text in TEXTS]
    _compare(make_worker_of(model, rows, _settings("sequence-classification", "tokenizer")).run(), expected)


def test_pairs_of_text_keep_their_token_types(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any]
) -> None:
    from transformers import pipeline

    model = make_model("AutoModelForSequenceClassification", "bert", _tokenizer(types=True), **SMALL)
    classify: Any = pipeline("text-classification", model=str(model))
    pairs = [{"text": text, "text_pair": pair} for text, pair in zip(TEXTS, PAIRS, strict=True)]
    worker = make_worker_of(model, pairs, _settings("sequence-classification", "tokenizer"))
    worker.settings["preprocessor"]["input_names"] = ["text", "text_pair"]
    worker.settings["model"]["input_names"] = ["input_ids"]  # what the tokenizer makes is used, too
    expected = [classify(pair, top_k=None) for pair in pairs]
    _compare(worker.run(), expected)

    tokens = [classify.tokenizer(**pair) for pair in pairs]
    rows = [dict(each) for each in tokens]
    worker = make_worker_of(model, rows, _settings("sequence-classification", None))
    _compare(worker.run(), expected)


def test_a_tensor_that_the_model_does_not_take_is_an_error(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("AutoModelForSequenceClassification", "bert", _tokenizer(), **SMALL)
    settings = _settings("sequence-classification", None, inputs=["input_ids", "attention_mask", "labels", "weights"])
    worker = make_worker_of(model, [{"input_ids": [1]}], settings)
    assert inference.main(worker.arguments()) == 2
    assert "input_names: 'weights' is no argument of the model, which takes input_ids, " in caplog.messages[-1]


@pytest.mark.parametrize("empty", [[""], ["a b", "", "some words"]])
def test_an_empty_text_is_an_error_alone_and_beside_others(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any], empty: list[str]
) -> None:
    model = make_model("AutoModelForSequenceClassification", "bert", _tokenizer(framed=False), **SMALL)
    rows = [{"text": text} for text in empty]
    found = make_worker_of(model, rows, _settings("sequence-classification", "tokenizer")).run()
    error = {"kind": "wrong-value", "detail": "the text has no token"}
    assert [row.get("error") for row in found] == [None if text else error for text in empty]


def test_a_model_with_positions_from_its_padding_takes_fewer_tokens(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any]
) -> None:
    roberta = SMALL | {"pad_token_id": 3}
    model = make_model("AutoModelForSequenceClassification", "roberta", _tokenizer(framed=False), **roberta)
    rows = [{"text": "x" * 36}, {"text": "x" * 37}, {"text": 7}]
    found = make_worker_of(model, rows, _settings("sequence-classification", "tokenizer")).run()
    long = {"kind": "too-long", "detail": "37 tokens; the model takes 36"}
    assert [row.get("error") for row in found[:2]] == [None, long]
    assert found[2]["error"]["kind"] == "wrong-type"


def test_tokens_out_of_range_are_errors_of_their_rows(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "tokens.safetensors"
    tokens = np.array([[1, 2, 3], [1, 64, 3], [3, 2, -1], [3, 2, 1]])
    safetensors.numpy.save_file({"input_ids": tokens}, path)
    model = make_model("AutoModelForSequenceClassification", "bert", None, **SMALL)
    inputs = ["input_ids", "attention_mask"]  # as jobs name them that leave it to the default
    found = make_worker_of(model, path, _settings("sequence-classification", None, inputs=inputs)).run()
    assert [row.get("error", {}).get("detail") for row in found] == [
        None,
        "column 'input_ids': 64 is no token; they are 0 to 63",
        "column 'input_ids': -1 is no token; they are 0 to 63",
        None,
    ]


# ---------------------------------------------------------------------------------------------------------- generation

LONGER: Final = SMALL | {"num_labels": None, "max_position_embeddings": 80}
DECODERS: Final = ("bert", "roberta", "big_bird", "rembert", "electra", "megatron-bert", "roformer")
WRITERS: Final[dict[str, Any]] = {
    "gpt2": GPT2, "gpt2/ends": GPT2 | {"eos_token_id": [7, END, 3]}, "gpt2/padded": GPT2 | {"pad_token_id": 4},
    "llama": {}, "bart": BART | {"is_encoder_decoder": False}, "xlnet": XLNET, "opt": OPT, "xlm": XLM, "ctrl": CTRL,
    "reformer": {
        "num_attention_heads": 2, "attention_head_size": 8, "attn_layers": ["local", "lsh"], "num_buckets": 4,
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "hash_seed": 0, "feed_forward_size": 48,
        "axial_pos_shape": [4, 16], "axial_pos_embds_dim": [8, 24], "max_position_embeddings": 64, "is_decoder": True,
    },
    "bloom": {"n_layer": 2, "n_head": 4}, "openai-gpt": GPT2, "mistral": {}, "mixtral": {"num_local_experts": 4},
    "mamba": {"state_size": 8}, "rwkv": {"attention_hidden_size": 32}, "gemma2": {}, "gemma3_text": {}, "qwen2": {},
    "gpt_neo": NEO, "gptj": GPT2 | {"rotary_dim": 4}, "biogpt": {}, "pegasus": BART, "mbart": BART, "marian": BART,
    "git": {}, "falcon": {"head_dim": None}, "phi": {}, "llama4_text": {}, "minimax": {}, "lfm2": {},
} | {name: {"is_decoder": True} for name in DECODERS}  # fmt: skip
"""Configurations by the model's type; those of the end tokens and the padding of GPT-2 differ from the tokenizer's."""


@pytest.mark.parametrize("name", _every_night(WRITERS, ("gpt2/ends", "xlnet")))
def test_texts_equal_those_of_the_pipeline(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any], name: str
) -> None:
    from transformers import pipeline

    settings = LONGER | WRITERS[name]
    model = make_model("AutoModelForCausalLM", name.partition("/")[0], _tokenizer(framed=False), **settings)
    write = pipeline("text-generation", model=str(model))
    write._preprocess_params, write._forward_params = {}, {}  # XLNet's continues an article before each prompt
    greedy = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    expected = [write(text, **greedy)[0]["generated_text"] for text in TEXTS]
    chosen = {"prompt": "{text}", "max_new_tokens": 12, "batch_size": 4}
    worker = make_worker_of(
        model, [{"text": text} for text in TEXTS],
        {"task": "generate", "type": "causal-lm", "inference": chosen},
    )  # fmt: skip
    assert [row["text"] for row in worker.run()] == expected
    assert len(set(expected)) > 3, "the texts should differ"


@pytest.mark.parametrize(("name", "words"), [("gpt2", "rows of any length"), ("bart", "only rows of equal length")])
def test_the_log_says_which_rows_share_a_batch(
    make_model: Callable[..., Path],
    make_worker_of: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    name: str,
    words: str,
) -> None:
    caplog.set_level("INFO")
    model = make_model("AutoModelForCausalLM", name, _tokenizer(framed=False), **LONGER | WRITERS[name])
    chosen = {"task": "generate", "type": "causal-lm", "inference": {"prompt": "{text}", "max_new_tokens": 2}}
    make_worker_of(model, [{"text": "a"}], chosen).run()
    assert any(message.startswith(f"{words} share a batch") for message in caplog.messages)


def test_tokens_that_the_model_suppresses_are_in_no_text(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any]
) -> None:
    model = make_model("AutoModelForCausalLM", "gpt2", _tokenizer(framed=False), **LONGER | GPT2)
    chosen = {"task": "generate", "type": "causal-lm", "inference": {"prompt": "{text}", "max_new_tokens": 12}}
    rows = [{"text": text} for text in TEXTS]
    usual = {letter for row in make_worker_of(model, rows, chosen).run() for letter in row["text"]}
    excluded = sorted(usual & {*LETTERS})[:3]
    assert excluded
    suppressed = {"suppress_tokens": [LETTERS.index(each) for each in excluded]}
    (model / "generation_config.json").write_text(json.dumps(suppressed))
    found = make_worker_of(model, rows, chosen).run()
    assert not any(letter in row["text"] for row in found for letter in excluded)


# ------------------------------------------------------------------------------------------------ images, sound, videos

VISION: Final = {
    "image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "num_labels": 3, "initializer_range": 0.4,
}  # fmt: skip
CONVOLUTIONS: Final = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
IMAGES: Final[Mapping[str, dict[str, Any]]] = {
    "vit": VISION, "vit/one": VISION | {"num_labels": 1}, "vit/regression": VISION | {"problem_type": "regression"},
    "vit/multi": VISION | {"problem_type": "multi_label_classification"}, "resnet": CONVOLUTIONS, "beit": VISION,
    "regnet": CONVOLUTIONS, "dinov2": VISION, "convnext": CONVOLUTIONS | {"num_stages": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", _every_night(IMAGES, ("vit/one", "resnet")))
def test_classes_of_images_equal_those_of_the_pipeline(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    from transformers import ViTImageProcessor, pipeline

    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    model = make_model("AutoModelForImageClassification", name.partition("/")[0], processor, **IMAGES[name])
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    safetensors.numpy.save_file({"image": images}, tmp_path / "slice.safetensors")
    classify = pipeline("image-classification", model=str(model))
    expected = [classify(image, top_k=10) for image in images]
    worker = make_worker_of(model, tmp_path / "slice.safetensors", _settings("image-classification", "image"))
    _compare(worker.run(), expected)


WAVES: Final = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "num_labels": 3,
    "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16, "vocab_size": 32,
    "initializer_range": 0.4,
}  # fmt: skip
SPECTROGRAM: Final = VISION | {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 4, "time_stride": 4}
SOUNDS: Final[Mapping[str, dict[str, Any]]] = {
    "wav2vec2": WAVES, "hubert": WAVES, "wavlm": WAVES,
    "wav2vec2/multi": WAVES | {"problem_type": "multi_label_classification"}, "sew": WAVES | {"squeeze_factor": 1},
    "audio-spectrogram-transformer": SPECTROGRAM, "unispeech-sat": WAVES,
}  # fmt: skip


@pytest.mark.parametrize("name", _every_night(SOUNDS, ("wav2vec2/multi",)))
def test_classes_of_sounds_equal_those_of_the_pipeline(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    import transformers as library

    transformers: Any = library
    if name.startswith("audio"):
        processor = transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=32)
    else:
        processor = transformers.Wav2Vec2FeatureExtractor()
    model = make_model("AutoModelForAudioClassification", name.partition("/")[0], processor, **SOUNDS[name])
    random = np.random.default_rng(0)
    sounds = [random.normal(0, 0.2, length).astype(np.float32) for length in (4000, 3000, 4000, 4000, 3500)]
    classify = transformers.pipeline("audio-classification", model=str(model))
    expected = [classify(sound, top_k=None) for sound in sounds]
    rows = [{"audio": sound.tolist()} for sound in sounds]
    settings = _settings("audio-classification", "feature", inputs=["input_ids", "attention_mask"])  # as schedulers do
    _compare(make_worker_of(model, rows, settings).run(), expected)


@pytest.mark.parametrize("problem", [pytest.param(None, marks=pytest.mark.nightly), "multi_label_classification"])
def test_classes_of_videos_equal_those_of_the_pipeline(
    make_model: Callable[..., Path], make_worker_of: Callable[..., Any], tmp_path: Path, problem: str | None
) -> None:
    from transformers import AutoModelForVideoClassification
    from transformers.pipelines.video_classification import VideoClassificationPipeline

    settings = VISION | {"num_frames": 4, "tubelet_size": 2, "problem_type": problem}
    model = make_model("AutoModelForVideoClassification", "videomae", None, **settings)
    videos = np.random.default_rng(0).normal(0, 1, (5, 4, 3, 16, 16)).astype(np.float32)
    safetensors.numpy.save_file({"pixel_values": videos}, tmp_path / "slice.safetensors")
    loaded = AutoModelForVideoClassification.from_pretrained(model).eval()
    decoded: Any = VideoClassificationPipeline.__new__(VideoClassificationPipeline)  # whose __init__ needs PyAV
    decoded.model = loaded
    with torch.inference_mode():
        expected = [
            decoded.postprocess(loaded(pixel_values=torch.from_numpy(video[None])), top_k=3) for video in videos
        ]
    worker = make_worker_of(model, tmp_path / "slice.safetensors", _settings("video-classification", None))
    _compare(worker.run(), expected)


# ----------------------------------------------------------------------------------- rows that do not depend on others

NET: Final = """
import torch

class Net(torch.nn.Module):
    def __init__(self, centres):
        super().__init__()
        self.centres = centres
        self.linear = torch.nn.Linear(2, 2)
        torch.nn.init.eye_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return self.linear(x - x.mean(0) if self.centres and len(x) > 1 else x)
"""


@pytest.fixture
def own_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Path]:
    """Return a function that writes a model of a class of the owner, which may compute rows as differences."""
    from hypha.accelerate_executor.modeling.torch import write_torch_model

    (tmp_path / "own_net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(centres: bool) -> Path:
        path = tmp_path / f"net-{centres}"
        write_torch_model("own_net:Net", {"centres": centres}, 0, path)
        return path

    return make


def test_the_type_of_a_column_does_not_depend_on_the_batch(
    own_class: Callable[[bool], Path], make_worker_of: Callable[..., Any], fails: Callable[..., str]
) -> None:
    rows = [{"x": x} for x in ([1, 2], [1.0, 2.0], "", None, [3, 0.5], "ab", [], [2, 1])]
    found = []
    for size in (1, 3, 8):
        settings = {"task": "classify", "type": "torch", "inference": {"batch_size": size}, "columns": ["scores"]}
        found.append(make_worker_of(own_class(False), rows, settings).run("--allow-module", "own_net"))
    assert found[1] == found[2] == found[0]
    kinds = [row.get("error", {}).get("kind") for row in found[0]]
    assert kinds == [None, None, "wrong-type", "wrong-type", None, "wrong-type", "failed", None]
    assert found[0][0]["scores"] == found[0][1]["scores"]
    assert [row.get("label") for row in found[0]] == [1, 1, None, None, 0, None, None, 0]
    worker = make_worker_of(own_class(False), rows, settings)
    assert "not allowed on this worker" in fails(inference.main, worker.arguments(), 2)


def test_rows_of_a_model_that_mixes_them_are_computed_alone(
    own_class: Callable[[bool], Path], make_worker_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rows = [{"x": [0.5 * number, 1.0]} for number in range(6)]
    settings = {"task": "classify", "type": "torch", "inference": {"batch_size": 4}, "columns": ["scores"]}
    found = make_worker_of(own_class(True), rows, settings).run("--allow-module", "own_net")
    logits = torch.tensor([[0.5 * number, 1.0] for number in range(6)])
    np.testing.assert_allclose([row["scores"] for row in found], torch.softmax(logits, -1), atol=1e-6)
    assert any(message.startswith("each row is computed alone") for message in caplog.messages)
