"""Images in a folder with one folder a class, as ``pixel_values`` and ``labels``. Needs the extra ``formats``."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha_data.errors import DatasetError
from hypha_data.sources.options import ReadOptions
from hypha_data.sources.reader import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    LABELS,
    MAX_CLASSES,
    Arrays,
    Layout,
    OnProgress,
    SampleLayout,
    files_state,
    import_extra,
    in_blocks,
)
from hypha_proto.texts import quote

IMAGE_SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
MAX_PIXELS: Final = 16 << 20
"""Largest number of pixels of an image."""
_DECODING_ERRORS: Final = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    struct.error,
)
"""What Pillow's decoders raise for a damaged file."""
_ORIENTATION: Final = 0x0112
"""EXIF tag of how a camera was held."""
_QUARTER_TURNS: Final = frozenset({5, 6, 7, 8})
"""Orientations that exchange width and height."""
_GRAY: Final = frozenset({"1", "L", "LA"})


class ImageFolder:
    """Reader of a folder of images; a `hypha_data.sources.reader.SampleReader`.

    Classes are numbered in the order of their names. Images are gray if all are, otherwise RGB, without alpha, and
    upright as their EXIF orientation says.
    """

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        """Find the classes.

        Raises:
            DatasetError: there are none, or Pillow is missing.
        """
        self._folder = folder
        self._size = options.size
        self._raw = options.raw_pixels
        self._image: Any = import_extra("PIL.Image", "reading images")
        self._ops: Any = import_extra("PIL.ImageOps", "reading images")
        self._classes = sorted(
            path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
        if not self._classes or len(self._classes) > MAX_CLASSES:
            raise DatasetError(
                f"{folder}: has {len(self._classes)} folders; make one for each class, at most {MAX_CLASSES}, with its "
                "images, such as cat/1.png"
            )
        if self._size is not None and not 1 <= self._size[0] * self._size[1] <= MAX_PIXELS:
            raise DatasetError(f"--size {self._size[0]}x{self._size[1]}: 1 to {MAX_PIXELS} pixels")

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Yield each image with the number of its class; memory holds the names of one class."""
        for number, name in enumerate(self._classes):
            folder = self._folder / name
            found = sorted(path for path in folder.iterdir() if _is_image(path))
            if not found:
                raise DatasetError(
                    f"{folder}: holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}); add some or remove it"
                )
            for path in found:
                yield path, number

    def state(self) -> str:
        """Return a digest of the files' states."""
        return files_state(path for path, _ in self._files())

    def scan(self, on_progress: OnProgress) -> Layout:
        """Read the size and mode of each image."""
        size, channels, first = self._size, 1, Path()
        for found, (path, _) in enumerate(self._files(), 1):
            with self._open(path) as image:
                width, height = self._upright_size(path, image)
                channels = max(channels, 1 if image.mode in _GRAY else 3)
            if size is None:
                size, first = (height, width), path
            elif self._size is None and size != (height, width):
                raise DatasetError(
                    f"{path}: {height}x{width} pixels (height x width), and {first} has {size[0]}x{size[1]}; give the "
                    "size that all get by --size HxW"
                )
            on_progress("images checked", found)
        assert size is not None
        name, dtype = ("image", "U8") if self._raw else ("pixel_values", "F32")
        tensors = {
            name: SampleLayout(dtype=dtype, shape=(channels, *size)),
            LABELS: SampleLayout(dtype="I64", shape=()),
        }
        return Layout(tensors=tensors, labels=tuple(self._classes))

    def blocks(self, layout: Layout, first: int) -> Iterator[Arrays]:
        """Decode the images; see `hypha_data.sources.reader.SampleReader`."""
        name = next(name for name in layout.tensors if name != LABELS)
        shape = layout.tensors[name].shape
        most = max(1, min(BLOCK_ROWS, BLOCK_BYTES // (4 * int(np.prod(shape)))))
        files = itertools.islice(self._files(), first, None)
        for block in in_blocks(files, most):
            images = [self._read(path, shape) for path, _ in block]
            yield {name: self._scale(images), LABELS: np.array([label for _, label in block], np.int64)}

    def _scale(self, images: list[NDArray[Any]]) -> NDArray[Any]:
        stacked = np.stack(images)
        if self._raw:
            return stacked
        scaled = stacked.astype(np.float32)
        scaled /= np.float32(255)
        return scaled

    def _open(self, path: Path) -> Any:
        try:
            image = self._image.open(path)
        except (*_DECODING_ERRORS, self._image.DecompressionBombError) as error:
            raise self._broken(path, error) from None
        if image.size[0] * image.size[1] > MAX_PIXELS:
            image.close()
            raise DatasetError(
                f"{path}: {image.size[0]}x{image.size[1]} pixels; at most {MAX_PIXELS}: scale it down first"
            )
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            image.close()
            raise DatasetError(f"{path}: pixels of more than 8 bits (mode {image.mode}): convert it to 8 bits first")
        return image

    def _upright_size(self, path: Path, image: Any) -> tuple[int, int]:
        """Return width and height as the EXIF orientation shows the image."""
        try:
            is_turned = image.getexif().get(_ORIENTATION, 1) in _QUARTER_TURNS
        except _DECODING_ERRORS as error:
            raise self._broken(path, error) from None
        width, height = image.size
        return (height, width) if is_turned else (width, height)

    def _read(self, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return an image as (channels, height, width)."""
        channels, height, width = shape
        with self._open(path) as image:
            try:
                turned = self._upright_size(path, image) != image.size
                image.draft("L" if channels == 1 else "RGB", (height, width) if turned else (width, height))
                upright = self._ops.exif_transpose(image)
                converted = upright.convert("L" if channels == 1 else "RGB")
                if converted.size != (width, height):
                    converted = converted.resize((width, height), self._image.Resampling.BILINEAR)
                pixels = np.asarray(converted, np.uint8)
            except _DECODING_ERRORS as error:
                raise self._broken(path, error) from None
        return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _broken(self, path: Path, error: Exception) -> DatasetError:
        reason = " ".join(str(error).replace(repr(str(path)), "it").split())
        return DatasetError(f"{path}: a damaged image, or none: {quote(reason)}; replace or remove it")


def _is_image(path: Path) -> bool:
    """Return whether a file is an image by its name; those that begin with a dot are the system's, such as ._1.png."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
