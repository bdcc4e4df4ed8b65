"""`DatasetSource`: a map-style `torch.utils.data.Dataset` of (image, label) as a source.

Accepts datasets of torchvision, `Subset` and `ConcatDataset`, Hugging Face's `datasets.Dataset`
(items are dicts with `image` and `label`), and other objects with `__len__` and `__getitem__`.
Labels are needed before training. They come from `targets`, `labels` or `samples` of the dataset,
or from reading every item once. Several threads read items at the same time, unless a check of a
few items finds that concurrent reads change the items.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import ConcatDataset, Subset

from paceline.core.errors import DataError
from paceline.core.untrusted import short_repr
from paceline.data.image import GREY_MODES, CorruptImage, to_mode
from paceline.data.order import Int64
from paceline.data.prefetch import map_ahead
from paceline.data.sources.base import Source, Stored
from paceline.data.sources.classes import numbered_classes

_IMAGE_KEYS, _LABEL_KEYS = ("image", "img"), ("label", "labels")
_LABEL_ATTRIBUTES = ("targets", "labels", "samples")
_IMAGES = "an image is a PIL image, HWC or HW uint8 array, or CHW tensor, uint8 or float in [0, 1]"
_ROUNDED = "float images are rounded to 8 bits"
_THREADS = 8
_MOST_CLASSES = 1_000_000


class DatasetSource(Source):
    """A source whose samples are the items of a map-style Dataset.

    Example:
        >>> source = DatasetSource(torchvision.datasets.CIFAR10("data", train=True))  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Any,
        classes: Sequence[str] | None = None,
        labels: Sequence[int] | None = None,
        *,
        serial: bool = False,
    ) -> None:
        """Checks a few items and finds the labels.

        Args:
            dataset: A map-style dataset of (image, label).
            classes: Names of the classes. The default is `dataset.classes`, or else class indices.
            labels: Class index of each item, for a dataset without a list of labels.
            serial: Reads one item at a time, for a dataset that threads must not share. The check
                of a few items might not detect such a dataset.

        Raises:
            DataError: If the object is no map-style dataset, or an item is not (image, label).
        """
        self._dataset = dataset
        self._type = type(dataset).__name__
        self._serial = serial
        self._lock: AbstractContextManager[object] = threading.Lock() if serial else nullcontext()
        self._notes: list[str] = []
        count = _length(dataset, self._type)
        checked = sorted({0, count // 3, 2 * count // 3, count - 1})
        first = {i: self._label(i) for i in checked}
        self._check_reads(checked)
        self.labels = self._find_labels(count, labels, first)
        names = classes if classes is not None else _find(dataset, _own_classes)
        highest = int(self.labels.max())
        self.classes = numbered_classes(highest + 1) if names is None else [str(n) for n in names]
        invalid = (self.labels < 0) | (self.labels >= len(self.classes))
        if invalid.any():
            i = int(np.argmax(invalid))
            raise self._error(
                i, f"has label {self.labels[i]}, but there are {len(self.classes)} classes",
                "labels are 0, 1, 2 …; give the names of all classes",
            )  # fmt: skip

    def _check_reads(self, items: Sequence[int]) -> None:
        """Checks that repeated reads return equal items, and whether several threads may read items."""
        expected = {}
        for i in items:
            try:
                one, two = self._content(i), self._content(i)
            except CorruptImage:
                continue
            self._check_label(i, one[0], two[0])
            if one == two:
                expected[i] = one
            elif self.is_constant:
                self.is_constant = False
                self._notes.append(
                    f"{self._type}[{i}] differs between two reads (random transforms?), so the run "
                    "cannot be repeated bit by bit; see `augment`"
                )
        if not self._serial and not _threads_agree(self._content, expected):
            self._serial, self._lock = True, threading.Lock()
            self._notes.append(
                f"{self._type} gives different items if several threads read it, so they are read one "
                "at a time"
            )

    def _content(self, i: int) -> tuple[int, object, bytes]:
        """Returns label, shape and bytes of item `i`, for comparisons."""
        label, stored = self._labelled(i)
        if isinstance(stored, bytes):
            return label, None, stored
        return label, stored.shape, stored.tobytes()

    def _find_labels(
        self, count: int, given: Sequence[int] | None, first: Mapping[int, int | None]
    ) -> Int64:
        """Finds the label of each item.

        Uses `given` if not None. Otherwise uses the dataset's list of labels if it agrees with
        `first`, the labels of some items. Otherwise reads every item.
        """
        values = given if given is not None else _find(self._dataset, _own_labels)
        labels = None if values is None else _as_labels(values, count)
        if given is not None and labels is None:
            raise DataError(
                f"{self._type}: `labels` is not a list of {count} integers",
                "give one class index for each item",
            )
        if labels is not None:
            different = [i for i, label in first.items() if label not in (None, labels[i])]
            if not different:
                return labels
            if given is not None:
                i = different[0]
                raise self._error(
                    i, f"has label {first[i]}, but `labels` gives {labels[i]}", "leave `labels` out"
                )
            # A target_transform changes the labels of the items, but not `dataset.targets`.
            self._notes.append(
                "labels come from the items, which differ from the dataset's own list"
            )
        return self._read_labels(count)

    def _read_labels(self, count: int) -> Int64:
        labels = np.empty(count, dtype=np.int64)
        corrupt = 0
        threads = min(_THREADS, os.cpu_count() or 1)
        for i, label in enumerate(map_ahead(self._label, range(count), threads)):
            # A corrupt item has no label. The model never gets this item.
            labels[i] = 0 if label is None else label
            corrupt += label is None
        if corrupt == count:
            raise self._error(0, "no image of the dataset can be decoded", "check the images")
        self._notes.append(
            f"labels of {count:,} items were read once, as the dataset has no list of them"
        )
        return labels

    def _labelled(self, i: int) -> tuple[int, Stored]:
        with self._lock:
            image, label = self._item(i)
            stored = self._pixels(i, image)
            # The dataset may reuse the memory of this array for the next item.
            if self._serial and isinstance(stored, np.ndarray):
                stored = stored.copy()
            return label, stored

    def read(self, i: int) -> Stored:
        """Returns the bytes of an image file, or pixels as height × width × channels.

        Raises:
            CorruptImage: If the dataset fails to decode the image.
            DataError: If the dataset raises any other error.
        """
        label, stored = self._labelled(i)
        self._check_label(i, self.labels[i], label)
        return stored

    def _check_label(self, i: int, before: int, label: int) -> None:
        if label != before:
            raise self._error(
                i, f"has label {label}, before it was {before}",
                "an item must always have the same label",
            )  # fmt: skip

    def name(self, i: int) -> str:
        return f"{self._type}[{i}]"

    @property
    def kind(self) -> str:
        return self._type

    @property
    def note(self) -> str:
        return "; ".join(self._notes)

    def _label(self, i: int) -> int | None:
        """Returns the label of item `i`, or None if the image cannot be decoded."""
        try:
            with self._lock:
                return self._item(i)[1]
        except CorruptImage:
            return None

    def _item(self, i: int) -> tuple[Any, int]:
        try:
            item = self._dataset[i]
        except Exception as error:  # noqa: BLE001  (the user's code)
            self._raise(i, error)
        if isinstance(item, Mapping):
            image, label = (_first(item, keys) for keys in (_IMAGE_KEYS, _LABEL_KEYS))
            if image is None or label is None:
                keys = ", ".join(map(repr, list(item)[:8]))
                raise self._error(i, f"has the keys {keys}", "an item needs 'image' and 'label'")
            return image, self._integer(i, label)
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise self._error(i, f"is {_described(item)}", "an item is (image, label)")
        return item[0], self._integer(i, item[1])

    def _raise(self, i: int, error: Exception) -> NoReturn:
        if isinstance(error, MemoryError | CorruptImage):
            raise error
        if _is_decoding_error(error):
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CorruptImage(reason) from error
        raise self._error(
            i, f"raised {type(error).__name__}: {error}", "fix the dataset's __getitem__"
        ) from error

    def _integer(self, i: int, label: Any) -> int:
        if isinstance(label, torch.Tensor | np.generic | np.ndarray) and label.ndim == 0:
            label = label.item()
        if type(label) is not int or abs(label) >= _MOST_CLASSES:
            raise self._error(i, f"has label {_described(label)}", "a label is a class index")
        return label

    def _pixels(self, i: int, image: Any) -> Stored:
        if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
            image = image["bytes"]  # Hugging Face's Image(decode=False)
        if isinstance(image, bytes):
            return image
        if isinstance(image, Image.Image):
            try:
                gray = image.mode in GREY_MODES or image.mode.startswith("I")
                return _three_axes(np.asarray(to_mode(image, "L" if gray else "RGB")))
            except Exception as error:  # noqa: BLE001  (opened lazily, decoded here)
                self._raise(i, error)
        pixels: Any = self._of_tensor(i, image) if isinstance(image, torch.Tensor) else image
        is_image = (
            isinstance(pixels, np.ndarray)
            and pixels.dtype == np.uint8
            and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4)))
            and pixels.size
        )
        if not is_image:
            raise self._error(i, f"has an image that is {_described(image)}", _IMAGES)
        pixels = _three_axes(pixels)
        return np.ascontiguousarray(pixels[:, :, :3]) if pixels.shape[2] == 4 else pixels

    def _of_tensor(self, i: int, image: torch.Tensor) -> npt.NDArray[np.uint8] | None:
        if image.ndim == 3 and image.shape[0] not in (1, 3, 4):
            return None
        image = image.detach().cpu()
        if image.is_floating_point() and image.ndim == 3 and image.numel():
            low, high = (float(value) for value in torch.aminmax(image))
            if not (low >= 0 and high <= 1):
                raise self._error(
                    i, f"has values from {low:.3g} to {high:.3g}",
                    "floats are in [0, 1]: leave normalization to data.mean and data.std",
                )  # fmt: skip
            image = image.mul(255).round().to(torch.uint8)
            if _ROUNDED not in self._notes:
                self._notes.append(_ROUNDED)
        if image.dtype != torch.uint8:
            return None
        if image.ndim == 3:
            image = image.permute(1, 2, 0)
        return image.contiguous().numpy()

    def _error(self, i: int, problem: str, remedy: str) -> DataError:
        return DataError(f"{self._type}[{i}] {problem}", remedy)


def _as_labels(values: Any, count: int) -> Int64 | None:
    """Returns `values` as an array if they are `count` integers, else None."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        return None
    if array.shape != (count,) or array.dtype.kind not in "iu":
        return None
    if not -_MOST_CLASSES < int(array.min()) <= int(array.max()) < _MOST_CLASSES:
        return None
    return array.astype(np.int64)


def _three_axes(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _length(dataset: Any, name: str) -> int:
    """Returns the number of items. Raises DataError if the dataset is empty or has no length."""
    remedy = "give a map-style dataset, with __len__ and __getitem__"
    if not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name}: is not a map-style dataset", remedy)
    try:
        count = len(dataset)
    except Exception as error:
        raise DataError(
            f"{name}: has no length ({type(error).__name__}: {error})", remedy
        ) from error
    if count < 1:
        raise DataError(f"{name}: is empty", "give a dataset with images")
    return count


def _first(item: Mapping[Any, Any], keys: Sequence[str]) -> Any:
    return next((item[key] for key in keys if key in item), None)


def _is_decoding_error(error: Exception) -> bool:
    """Returns True if `error` means that an image file is damaged.

    For damaged bytes, Pillow and torchvision raise exceptions of any type. Errors of the operating
    system, such as a missing file, differ by having an error number.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""
    return isinstance(error, UnidentifiedImageError) or module.startswith(
        ("PIL.", "torchvision.io.")
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a {kind} of shape {tuple(value.shape)} and {dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int | float | str | type(None)):
        return short_repr(value)
    return f"a {type(value).__name__}"


# Finding labels and classes in a dataset without reading its items.


def _find(dataset: Any, own: Callable[[Any], Any]) -> Any:
    """Calls `own` on the dataset, or on the datasets that a `Subset` or `ConcatDataset` wraps."""
    if isinstance(dataset, Subset):
        whole = _find(dataset.dataset, own)
        if whole is None or own is _own_classes:
            return whole
        return np.asarray(whole)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_find(part, own) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        if own is _own_classes:
            return parts[0] if all(list(part) == list(parts[0]) for part in parts) else None
        return np.concatenate([np.asarray(part) for part in parts])
    try:
        return own(dataset)
    except Exception:  # noqa: BLE001  (a property of the user's dataset fails)
        return None


def _own_labels(dataset: Any) -> Any:
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):  # Hugging Face
        key = next((key for key in _LABEL_KEYS if key in features), None)
        return None if key is None else list(dataset[key])
    for name in _LABEL_ATTRIBUTES:
        labels = getattr(dataset, name, None)
        if labels is not None and not callable(labels):
            return [label for _, label in labels] if name == "samples" else labels
    return None


def _own_classes(dataset: Any) -> Sequence[str] | None:
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        key = next((key for key in _LABEL_KEYS if key in features), None)
        names = getattr(features.get(key), "names", None)
    else:
        names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    return names


# If threads shared a dataset with one file handle or one buffer for all items, images would silently be
# wrong. The check finds races that occur often.
_CHECKING_THREADS, _READS = 4, 4
# Pauses of a thread between calls of the dataset. Without them, short reads would hardly ever overlap.
_PAUSES, _PAUSE_S = 200, 1e-5


def _threads_agree(read: Callable[[int], object], expected: Mapping[int, object]) -> bool:
    """Returns True if concurrent reads by several threads return the `expected` items."""
    items = list(expected)
    if len(items) < 2:
        return True
    start = threading.Barrier(_CHECKING_THREADS)

    def agrees(thread: int) -> bool:
        pauses = iter(range(_PAUSES))

        def pause(*_: object) -> None:
            if next(pauses, None) is not None:
                time.sleep(_PAUSE_S)

        start.wait()
        sys.setprofile(pause)  # for this thread only
        try:
            turns = (items[(thread + turn) % len(items)] for turn in range(_READS))
            return all(read(i) == expected[i] for i in turns)
        except Exception:  # noqa: BLE001  (one thread alone could read it)
            return False
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(_CHECKING_THREADS) as threads:
        return all(list(threads.map(agrees, range(_CHECKING_THREADS))))
