"""Preprocessors that a job applies to each batch: a tokenizer, an image processor, a feature extractor.

Applied to batches of `data.batches` before `train.trainer`. The preprocessor's input columns are replaced by its
outputs; other columns (labels) are kept. Text is stored in a slice as bytes: a uint8 tensor of shape (samples, bytes),
UTF-8, padded with zeros.

Images and sound are compared with what the processor will do to their values. An image processor divides by 255
whatever it gets: images that are already in 0..1 would all be nearly black. A feature extractor that takes a
spectrogram expects sound from -1 to 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha.accelerate_executor.data.samples import Arrays, decode_text
from hypha.accelerate_executor.errors import DataError, JobError, ModelError, RowError, reason_of
from hypha_proto.job_spec import PREPROCESSOR_INPUTS, TrainConfig
from hypha_proto.prompt_template import render

if TYPE_CHECKING:
    import torch

AUTO_CLASSES: Final[Mapping[str, str]] = {
    "auto": "AutoProcessor",
    "tokenizer": "AutoTokenizer",
    "feature": "AutoFeatureExtractor",
    "image": "AutoImageProcessor",
    "video": "AutoVideoProcessor",
}
"""Wire name of a preprocessor -> class of transformers."""
_TARGET: Final = "text_target"
_TEXT_NAMES: Final = ("text", "text_pair", _TARGET)
_LONGEST: Final = 1 << 20
"""A tokenizer with a larger limit has none."""


class BatchPreprocessor:
    """Replaces columns of a batch by inputs of the model.

    Attributes:
        columns: input columns of a slice, in order.
        is_text: whether the columns are text.
        longest: most tokens that a row may have, others are cut off; None if unknown.
    """

    def __init__(self, kind: str, process: Any, columns: Sequence[str], module: torch.nn.Module | None = None) -> None:
        """Wrap a processor of transformers.

        Args:
            kind: wire name, which decides how columns are passed.
            process: called on a batch.
            columns: input columns of a slice, in order.
            module: the model that gets the outputs. If its config has no padding token, the tokenizer's is set there.
        """
        from hypha.accelerate_executor.data.model_inputs import longest_input

        self.columns = tuple(columns)
        self._kind = kind
        self._process = process
        self._images: ImageRange | None = None
        """Checks the column of images; None if there is none or it is not known yet."""
        self.is_text = kind == "tokenizer" or hasattr(process, "tokenize")
        self._module = module
        own = None if module is None else longest_input(module)
        limits = [each for each in (own, getattr(process, "model_max_length", None)) if each and each < _LONGEST]
        self.longest = min(limits, default=None)
        self._padding = set_padding(process, module) if self.is_text else None

    def __call__(self, arrays: Arrays) -> Arrays:
        """Process one batch.

        Args:
            arrays: columns of the batch as stored.

        Returns:
            The remaining columns and the preprocessor's outputs.

        Raises:
            DataError: a column is missing, or the preprocessor rejects it or would distort its values.
        """
        missing = [name for name in self.columns if name not in arrays]
        if missing:
            raise DataError(
                f"a slice lacks the tensor {missing[0]!r} that the preprocessor takes; there are {sorted(arrays)}: "
                "name those that it shall take in the job's preprocessor.input_names"
            )
        columns = [arrays[name] for name in self.columns]
        self._check_values(columns)
        try:
            made = self._text(columns) if self.is_text else self._other(columns)
            found = {str(name): np.asarray(value) for name, value in dict(made).items()}
        except (ValueError, TypeError, KeyError, RuntimeError, IndexError) as error:
            shapes = {name: list(arrays[name].shape) for name in self.columns}
            raise DataError(f"the preprocessor rejects a batch of {shapes}: {error}") from error
        samples = len(columns[0])
        odd = [name for name, value in found.items() if value.ndim == 0 or len(value) != samples]
        if odd:
            raise DataError(f"the preprocessor's output {odd[0]!r} does not have one row per sample")
        self._check_names(found)
        rest = {name: value for name, value in arrays.items() if name not in self.columns}
        return rest | {name: _plain(value) for name, value in found.items()}

    def tokens(self, arrays: Arrays) -> list[list[int]]:
        """Return the tokens of each row of text, before it is cut off."""
        texts = dict(zip(_TEXT_NAMES, (decode_text(arrays[name]) for name in self.columns), strict=False))
        found: list[list[int]] = self._process(**texts)["input_ids"]
        return found

    def random_rows(self) -> list[Arrays]:
        """Return rows of random text that the model takes, two each of 1 to 24 random tokens."""
        random = np.random.default_rng(0)
        lengths = [1 + number // 2 for number in range(48)]
        texts = [self._process.decode(random.integers(len(self._process), size=length).tolist()) for length in lengths]
        encoded = [np.frombuffer(text.replace("\0", " ").encode(), np.uint8)[None] for text in texts]
        rows = [dict.fromkeys(self.columns, each) for each in encoded]
        return [row for row in rows if 0 < len(self.tokens(row)[0]) <= (self.longest or _LONGEST)]

    def _check_names(self, found: Mapping[str, Any]) -> None:
        """Refuse what the model would not get."""
        from hypha.accelerate_executor.data.model_inputs import takes_argument

        lost = [] if self._module is None else [name for name in found if not takes_argument(self._module, name)]
        if lost:
            raise DataError(
                f"the preprocessor makes {lost[0]!r}, which {type(self._module).__name__} does not take: use the one "
                "of the model, or leave it out of model_input_names in tokenizer_config.json"
            )

    def _check_values(self, columns: Sequence[NDArray[Any]]) -> None:
        """Check images and sound against what is done to them; masks and others beside them are not changed."""
        if self._kind == "feature":
            check_sound(self._process, self.columns[0], columns[0])
        images = self._process if self._kind in ("image", "video") else getattr(self._process, "image_processor", None)
        place = next((number for number, column in enumerate(columns) if column.ndim > 2), None)
        if images is None or place is None:
            return
        if self._images is None:
            self._images = ImageRange(images, self.columns[place])
        self._images.check(columns[place])

    def _text(self, columns: Sequence[NDArray[Any]]) -> Any:
        texts = dict(zip(_TEXT_NAMES, map(decode_text, columns), strict=False))
        bound = {"truncation": True, "max_length": self.longest} if self.longest else {}
        made = self._process(**texts, padding=True, return_tensors="np", **bound)
        if self._padding is not None and "attention_mask" in made:
            made["input_ids"] = np.where(made["attention_mask"] == 0, self._padding, made["input_ids"])
        if target := texts.get(_TARGET):  # its padding is no label, as in DataCollatorForSeq2Seq
            from hypha.accelerate_executor.data.model_inputs import IGNORED_LABEL

            kept = self._process(text_target=target, padding=True, return_tensors="np", **bound)["attention_mask"]
            made["labels"] = np.where(kept == 0, IGNORED_LABEL, made["labels"])
        return made

    def _other(self, columns: Sequence[NDArray[Any]]) -> Any:
        rate = getattr(self._process, "sampling_rate", None)
        extra = {"sampling_rate": rate} if self._kind == "feature" and rate is not None else {}
        return self._process(*(list(column) for column in columns), return_tensors="np", **extra)


def preprocessed_columns(config: TrainConfig) -> tuple[str, ...]:
    """Return the tensors of a slice that the job's preprocessor takes; empty without a preprocessor.

    Raises:
        JobError: the preprocessor is unknown, or its input columns are not named.
    """
    if config.preprocessor is None:
        return ()
    task = config.preprocessor.task
    if task not in AUTO_CLASSES:
        raise JobError(f"preprocessor {task!r} is unknown; known are {', '.join(AUTO_CLASSES)}")
    columns = config.preprocessor.input_names or PREPROCESSOR_INPUTS[task]
    if not columns:
        raise JobError(f"preprocessor {task!r} needs input-names: its input tensors of a slice")
    return tuple(columns)


def load_preprocessor(
    task: str, folder: Path, columns: Sequence[str], module: torch.nn.Module | None
) -> BatchPreprocessor:
    """Load a preprocessor from its files; code among them is never run.

    Args:
        task: wire name.
        folder: directory of its files.
        columns: input columns of a slice, in order.
        module: as of `BatchPreprocessor`.

    Raises:
        JobError: it needs a library that is not installed.
        ModelError: the files are not a preprocessor of this kind.
    """
    return BatchPreprocessor(task, _load(task, folder), columns, module)


def load_tokenizer(folder: Path) -> Any:
    """Load a tokenizer from its files; code among them is never run.

    Raises:
        ModelError: the files are no tokenizer.
    """
    return _load("tokenizer", folder)


def _load(task: str, folder: Path) -> Any:
    import transformers

    try:
        return getattr(transformers, AUTO_CLASSES[task]).from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except ImportError as error:
        raise JobError(f"preprocessor {task!r} needs a library that is not installed: {reason_of(error)}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # the last: deeply nested JSON
        raise ModelError(f"the preprocessor cannot be loaded as {task!r}: {reason_of(error)}") from error


def fill_template(template: str, value_of: Callable[[str], Any]) -> str:
    """Return the text of a prompt template with the values of one row.

    Args:
        template: checked by `columns_of`.
        value_of: returns the value of a column; raises `RowError` if there is none.

    Raises:
        RowError: a value is missing, or neither text, a number nor a boolean.
    """
    return render(template, lambda column: _as_text(column, value_of(column)))


def _as_text(column: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    kind = "null" if value is None else "a list" if isinstance(value, list) else "an object"
    raise RowError("wrong-type", f"column {column!r} is {kind}; the prompt takes text, numbers and booleans")


def encode_prompt(tokenizer: Any, text: str, *, is_chat: bool) -> list[int]:
    """Return the tokens of a prompt; with `is_chat` as a user's message that the tokenizer's chat template formats."""
    if not is_chat:
        return list(tokenizer(text)["input_ids"])
    message = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(chat, add_special_tokens=False)["input_ids"])


def set_padding(tokenizer: Any, module: torch.nn.Module | None) -> int | None:
    """Let tokenizer and model agree on a token that pads rows; return the model's, None if it has no vocabulary.

    A tokenizer without one pads with its end token. Some models look for a row's last token by comparing tokens with
    the padding, so that one which the tokenizer appends to every text is not taken for a model that names none.
    """
    from hypha.accelerate_executor.data.model_inputs import text_config, vocabulary_size

    appended = {*tokenizer("")["input_ids"]}
    own = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(next((each for each in own if each is not None), 0))
    size = None if module is None else vocabulary_size(module)
    if module is None or size is None:
        return None
    config = text_config(module)
    named = getattr(config, "pad_token_id", None)
    if isinstance(named, int) and 0 <= named < size:
        return named
    config.pad_token_id = next(
        each for each in (*own, *range(size)) if each is not None and each < size and each not in appended
    )
    return int(config.pad_token_id)


def _plain(value: NDArray[Any]) -> NDArray[Any]:
    return value.astype(np.float32 if value.dtype.kind == "f" else np.int64)


logger = logging.getLogger(__name__)

_BYTE: Final = 255
_ROUNDING: Final = 1e-3


class ImageRange:
    """Checks the images of one column. The first of them that are not black decide whether they are divided by 255."""

    def __init__(self, processor: Any, column: str) -> None:
        """Read what the image processor does.

        Args:
            processor: `do_rescale` is switched off for images in 0..1, as transformers advises.
            column: name, for errors.
        """
        self._processor = processor
        self._column = column
        self._is_known = False
        factor = getattr(processor, "rescale_factor", None) or 1 / _BYTE
        self._rescales = bool(getattr(processor, "do_rescale", False)) and factor < 1
        shifts = getattr(processor, "rescale_offset", False) or getattr(processor, "offset", False)
        self._is_plain = math.isclose(factor, 1 / _BYTE) and not shifts
        mean = getattr(processor, "image_mean", None)  # None: it takes the mean of each image
        normalizes = bool(getattr(processor, "do_normalize", False)) and mean is not None
        self._takes_unit = normalizes and bool((np.abs(np.asarray(mean)) <= 1).all())

    def check(self, images: NDArray[Any]) -> None:
        """Check a batch.

        Raises:
            DataError: the values are not those that the processor takes, or not in the range of the first images.
        """
        if not images.size or not (self._rescales or self._takes_unit):
            return
        if self._rescales and not self._is_known and images.dtype.kind == "f":
            self._learn(images)
        low, high = _range(images)
        if images.dtype.kind == "b" or low < -_ROUNDING or high > (_BYTE if self._rescales else 1) + _ROUNDING:
            self._fail(images, "0 to 255, which it divides by 255" if self._rescales else "floats from 0 to 1")

    def _learn(self, images: NDArray[Any]) -> None:
        """Decide by the first image that is not black whether floats are divided by 255."""
        first = next((image for image in images if _range(image)[1] > 0), None)
        if first is None:
            return
        self._is_known = True
        if _range(first)[1] > 1 + _ROUNDING:
            return
        if not self._is_plain:
            self._fail(images, "0 to 255, which it scales to another range than 0 to 1")
        self._rescales = self._processor.do_rescale = False
        logger.info("column %r holds floats within 0 to 1: its images are not divided by 255", self._column)

    def _fail(self, images: NDArray[Any], expected: str) -> None:
        low, high = _range(images)
        raise DataError(
            f"column {self._column!r} holds {images.dtype} from {low:.6g} to {high:.6g}, and the image processor "
            f"takes {expected}: store its images so, or change do_rescale in preprocessor_config.json"
        )


def check_sound(extractor: Any, column: str, sound: NDArray[Any]) -> None:
    """Check that sound is floats, unless the extractor scales it to unit variance itself.

    Raises:
        DataError: it is integers, which spectrograms of transformers take for 32,768 times louder sound.
    """
    scales = bool(getattr(extractor, "do_normalize", False)) and hasattr(extractor, "zero_mean_unit_var_norm")
    if sound.dtype.kind in "iu" and not scales:
        raise DataError(
            f"column {column!r} holds {sound.dtype}, and {type(extractor).__name__} takes floats from -1 to 1: divide "
            "its samples by the largest value of their type, 32768 for int16"
        )


def _range(values: NDArray[Any]) -> tuple[float, float]:
    """Return the smallest and the largest finite value; 0 if there is none."""
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
