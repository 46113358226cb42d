"""Every task loads the right Auto class of transformers, and the files of a model are those that it reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.utils as names
from support.stored_model import write_model

from hypha.accelerate_executor.data.preprocess import load_preprocessor
from hypha.accelerate_executor.errors import JobError, ModelError
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
