"""`DatasetSource`: a map-style `torch.utils.data.Dataset` of (image, label) as a source.

Takes datasets of torchvision, `Subset` and `ConcatDataset`, Hugging Face's `datasets.Dataset` (items are
dicts with `image` and `label`), and anything else with `__len__` and `__getitem__`. Labels are needed
before training: they come from `targets`, `labels` or `samples` where the dataset has them, else from
reading every item once. Items are read by several threads at once, unless a check of a few items finds
that the dataset gives other images then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
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
_THREADS = 8
_MOST_CLASSES = 1_000_000
# A pass over all labels that takes longer says how far it is.
_QUIET_S, _EVERY_S = 5.0, 10.0


class DatasetSource(Source):
    """`classes` are names, else the dataset's `classes`, else numbers. `labels` spare the pass over a
    dataset that does not tell them. `serial`: one item at a time, for a dataset that threads must not
    share; a race that the check of a few items does not meet is not noticed.

    >>> source = DatasetSource(torchvision.datasets.CIFAR10("data", train=True))   # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Any,
        classes: Sequence[str] | None = None,
        labels: Sequence[int] | None = None,
        *,
        serial: bool = False,
    ) -> None:
        """DataError where the dataset is none, or its items are not (image, label)."""
        self._dataset = dataset
        self._type = type(dataset).__name__
        self._serial = serial
        self._lock: AbstractContextManager[object] = threading.Lock() if serial else nullcontext()
        self._notes: list[str] = []
        self._float_noted = False
        count = _length(dataset, self._type)
        self._checked = sorted({0, count // 3, 2 * count // 3, count - 1})
        first = {i: self._label(i) for i in self._checked}
        if not serial:
            self._check_threads()
        self.labels = self._find_labels(count, labels, first)
        names = classes if classes is not None else _find(dataset, _own_classes)
        highest = int(self.labels.max())
        self.classes = numbered_classes(highest + 1) if names is None else [str(n) for n in names]
        if int(self.labels.min()) < 0 or highest >= len(self.classes):
            worst = int(np.argmax((self.labels < 0) | (self.labels >= len(self.classes))))
            raise self._error(
                worst, f"label {self.labels[worst]} is outside the {len(self.classes)} classes",
                "labels are 0, 1, 2 …; give the names of all classes",
            )  # fmt: skip
        self._check_repeats(first)

    def _find_labels(
        self, count: int, given: Sequence[int] | None, first: Mapping[int, int | None]
    ) -> Int64:
        """Those given or told by the dataset, where the items that were read agree; else the items'."""
        found = given if given is not None else _find(self._dataset, _own_labels)
        if found is not None:
            told = self._as_labels(found, count)
            if told is None:
                if given is not None:
                    raise DataError(
                        f"{self._type}: `labels` is not a list of {count} whole numbers",
                        "give one class index for each item",
                    )
            elif all(label in (None, told[i]) for i, label in first.items()):
                return told
            elif given is not None:
                wrong = next(i for i, label in first.items() if label not in (None, told[i]))
                raise self._error(
                    wrong,
                    f"has label {first[wrong]}, `labels` says {told[wrong]}",
                    "leave `labels` out",
                )
            else:
                # A target_transform, which `targets` knows nothing of.
                self._notes.append(
                    "labels are the items', which differ from the dataset's own list"
                )
        return self._read_labels(count)

    def _as_labels(self, found: Any, count: int) -> Int64 | None:
        """Whole numbers, one for each item; None where it is something else."""
        try:
            values = np.asarray(found)
        except (ValueError, TypeError):
            return None
        if values.shape != (count,) or values.dtype.kind not in "iu":
            return None
        if not -_MOST_CLASSES < int(values.min()) <= int(values.max()) < _MOST_CLASSES:
            return None
        return values.astype(np.int64)

    def _read_labels(self, count: int) -> Int64:
        labels = np.empty(count, dtype=np.int64)
        corrupt, progress = 0, _progress(self._type, count)
        found = map_ahead(self._label, range(count), min(_THREADS, os.cpu_count() or 1))
        for i, label in enumerate(found):
            # A corrupt image hides its label; the sample is never shown to the model.
            labels[i] = 0 if label is None else label
            corrupt += label is None
            progress(i + 1)
        if corrupt == count:
            raise self._error(0, "no image of the dataset can be decoded", "check the images")
        self._notes.append(
            f"labels of {count:,} items were read once, as the dataset has no list of them"
        )
        return labels

    def _check_threads(self) -> None:
        """Reads one item at a time from now on where threads get other items than one alone."""

        def content(i: int) -> tuple[int, object, bytes]:
            label, stored = self._both(i)
            if isinstance(stored, bytes):
                return label, None, stored
            return label, stored.shape, stored.tobytes()

        if not threads_agree(content, self._checked):
            self._serial, self._lock = True, threading.Lock()
            self._notes.append(
                f"{self._type} gives other items when several threads read it: they are read one at a "
                "time"
            )

    def _both(self, i: int) -> tuple[int, Stored]:
        """Label and pixels."""
        with self._lock:
            image, label = self._item(i)
            stored = self._pixels(i, image)
            # The dataset may use its memory for the next item.
            if self._serial and isinstance(stored, np.ndarray):
                stored = stored.copy()
            return label, stored

    def _check_repeats(self, first: Mapping[int, int | None]) -> None:
        """Reads a few items twice."""
        for i in self._checked:
            if first[i] is None:
                continue
            try:
                one, two = self.read(i), self.read(i)
            except CorruptImage:
                continue
            if not (one == two if isinstance(one, bytes) else np.array_equal(one, two)):
                self.is_constant = False
                self._notes.append(
                    f"{self._type}[{i}] differs between two reads (random transforms?): the run cannot "
                    "be repeated bit by bit; see `augment`"
                )
                return

    def read(self, i: int) -> Stored:
        """Encoded bytes, or height × width × channels. CorruptImage where the dataset fails to decode
        its image; DataError for whatever else it does wrong."""
        label, stored = self._both(i)
        if label != self.labels[i]:
            raise self._error(
                i, f"has label {label}, before it was {self.labels[i]}",
                "an item must have the same label whenever it is read",
            )  # fmt: skip
        return stored

    def name(self, i: int) -> str:
        return f"{self._type}[{i}]"

    @property
    def kind(self) -> str:
        return self._type

    @property
    def note(self) -> str:
        return "; ".join(self._notes)

    def _label(self, i: int) -> int | None:
        """None where the image cannot be decoded, and so there is no item."""
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
            return image, self._whole(i, label)
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise self._error(i, f"is {_described(item)}", "an item is (image, label)")
        return item[0], self._whole(i, item[1])

    def _raise(self, i: int, error: Exception) -> NoReturn:
        if isinstance(error, MemoryError | CorruptImage):
            raise error
        if _is_decoding_error(error):
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CorruptImage(reason) from error
        raise self._error(
            i, f"raised {type(error).__name__}: {error}", "fix the dataset's __getitem__"
        ) from error

    def _whole(self, i: int, label: Any) -> int:
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
                grey = image.mode in GREY_MODES or image.mode.startswith("I")
                return _three_axes(np.asarray(to_mode(image, "L" if grey else "RGB")))
            except Exception as error:  # noqa: BLE001  (opened lazily, decoded here)
                self._raise(i, error)
        pixels = self._of_tensor(i, image) if isinstance(image, torch.Tensor) else image
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
            raise self._error(i, f"has an image that is {_described(image)}", _IMAGES)
        if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
            raise self._error(i, f"has an image that is {_described(image)}", _IMAGES)
        if not pixels.size:
            raise self._error(i, f"has an image without pixels: {_described(image)}", _IMAGES)
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
            if not self._float_noted:
                self._float_noted = True
                self._notes.append("float images are rounded to 8 bits")
        if image.dtype != torch.uint8:
            return None
        if image.ndim == 3:
            image = image.permute(1, 2, 0)
        return image.contiguous().numpy()

    def _error(self, i: int, problem: str, remedy: str) -> DataError:
        return DataError(f"{self._type}[{i}] {problem}", remedy)


def _three_axes(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _length(dataset: Any, name: str) -> int:
    """DataError where there is no length, or nothing in it."""
    remedy = "give a map-style dataset, with __len__ and __getitem__"
    if not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name}: is no map-style dataset", remedy)
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
    """Whether a file was found, and its content is no sound image. Pillow raises almost anything for
    damaged bytes, but errors of the system (no such file, no permission) have a number."""
    if isinstance(error, UnidentifiedImageError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.startswith(("PIL.", "torchvision.io."))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return (
            f"a {kind} of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
        )
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int | float | str | type(None)):
        return short_repr(value)
    return f"a {type(value).__name__}"


def _progress(name: str, count: int) -> Callable[[int], None]:
    """To be told how many of a long pass are done; says so now and then, on rank 0."""
    due = time.monotonic() + _QUIET_S

    def step(done: int) -> None:
        nonlocal due
        if time.monotonic() > due and os.environ.get("RANK", "0") == "0":
            due = time.monotonic() + _EVERY_S
            sys.stderr.write(f"paceline: reading the labels of {name}: {done:,} of {count:,}\n")

    return step


# What a dataset tells without reading its items, and whether several threads may read it.


def _find(dataset: Any, own: Any) -> Any:
    """What `own` finds of the dataset, or of those that it is a part or a chain of."""
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
    except Exception:  # noqa: BLE001  (a property of the user's that fails is none)
        return None


def _own_labels(dataset: Any) -> Any:
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):  # Hugging Face
        key = next((key for key in _LABEL_KEYS if key in features), None)
        return None if key is None else list(dataset[key])
    for name in _LABEL_ATTRIBUTES:
        found = getattr(dataset, name, None)
        if found is not None and not callable(found):
            return [label for _, label in found] if name == "samples" else found
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


# A dataset with one file handle, or one buffer for all items, would give wrong images in silence. Races
# are a matter of chance: the check meets those that occur often.
_CHECKING_THREADS, _READS = 4, 4
# Pauses of a thread between the calls that the dataset makes, or short reads would hardly ever meet.
_PAUSES, _PAUSE_S = 200, 1e-5


def threads_agree(read: Callable[[int], object], items: Sequence[int]) -> bool:
    """Whether items that several threads read at once are those that one thread reads. `read` returns
    something comparable that shares no memory with other items. An item that fails, or differs between
    two reads of one thread, is left out: it says nothing about threads."""
    wanted = {}
    for i in items:
        try:
            one, two = read(i), read(i)
        except Exception:  # noqa: BLE001  (the user's code; it fails again where the item is used)
            continue
        if one == two:
            wanted[i] = one
    steady = list(wanted)
    if len(steady) < 2:
        return True
    start = threading.Barrier(_CHECKING_THREADS)

    def agrees(thread: int) -> bool:
        pauses = iter(range(_PAUSES))

        def pause(*_: object) -> None:
            if next(pauses, None) is not None:
                time.sleep(_PAUSE_S)

        start.wait()
        sys.setprofile(pause)  # of this thread alone
        try:
            turns = (steady[(thread + turn) % len(steady)] for turn in range(_READS))
            return all(read(i) == wanted[i] for i in turns)
        except Exception:  # noqa: BLE001  (one thread alone could read it)
            return False
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(_CHECKING_THREADS) as threads:
        return all(list(threads.map(agrees, range(_CHECKING_THREADS))))
