"""Compares type and range of a column with what a processor of transformers will do to its values.

Called by `preprocess`. An image processor divides by 255 whatever it gets: images that are already in 0..1 would all be
nearly black. A feature extractor that takes a spectrogram expects sound from -1 to 1.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha.accelerate_executor.errors import DataError

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
