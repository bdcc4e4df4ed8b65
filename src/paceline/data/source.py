"""`Source`: labelled images by index, whatever they are stored in.

In: the settings and a split. Out: shards, class folders, CIFAR-10, the embedded set or synthetic images
behind one protocol. Anything that is missing fails here, with the path, what was looked for and the
remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.data.cifar10 import Cifar10, find_layout
from paceline.data.class_list import read_classes
from paceline.data.image_folder import ImageFolder, class_directories
from paceline.data.randomness import Int64
from paceline.data.settings import DataSettings
from paceline.data.synthetic import SyntheticImages
from paceline.data.tar_shards import SHARD_SUFFIXES, TarShards

Split = Literal["train", "val"]
EMBEDDED = Path(__file__).parent / "embedded"
_LAYOUT = (
    "--data-dir takes a folder with train-*.tar and val-*.tar, with train/<class>/ and val/<class>/, "
    "or with CIFAR-10; the embedded images are data.source = embedded"
)


class Source(Protocol):
    """Read by several threads at once. `read` raises DataError where storage fails."""

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def labels(self) -> Int64: ...

    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes | npt.NDArray[np.uint8]:
        """The encoded image, or its pixels as height × width × channels."""

    def name(self, i: int) -> str:
        """Where the sample lies, for messages."""

    def close(self) -> None: ...


@runtime_checkable
class ArraySource(Source, Protocol):
    """One that has all its images at hand, equal in size: samples × height × width × channels."""

    @property
    def pixels(self) -> npt.NDArray[np.uint8]: ...


def open_source(
    settings: DataSettings, split: Split, classes: Sequence[str] | None = None
) -> Source:
    """Opens one split. `classes`, those of the training split, pin what the labels mean where the
    data does not say it: a validation split may lack some classes."""
    if settings.source == "synthetic":
        return _synthetic(settings, split)
    if settings.source == "embedded":
        return _shards(EMBEDDED, split, classes)
    if not settings.dir:
        # Never the embedded set in place of somebody's forgotten --data-dir.
        raise DataError("no data: data.dir is not set", _LAYOUT)
    directory = Path(settings.dir).expanduser()
    _check_directory(directory)
    kind = settings.source if settings.source != "auto" else detect(directory, split)
    if kind == "shards":
        return _shards(directory, split, classes)
    if kind == "cifar10":
        return Cifar10(directory, split)
    return _folder(directory, split, classes)


def detect(directory: Path, split: Split) -> Literal["shards", "folder", "cifar10"]:
    """What `directory` holds of `split`; several or nothing is the user's to settle."""
    signs: dict[Literal["shards", "folder", "cifar10"], tuple[str, bool]] = {
        "shards": (f"{split}-*.tar", bool(_shard_paths(directory, split))),
        "folder": (f"{split}/", (directory / split).is_dir()),
        "cifar10": ("CIFAR-10", find_layout(directory, split) is not None),
    }
    found = [kind for kind, (_, there) in signs.items() if there]
    if len(found) > 1:
        raise DataError(
            f"{directory}: holds {' and '.join(signs[kind][0] for kind in found)}",
            f"set data.source = {' or '.join(map(repr, found))}",
        )
    if not found:
        raise DataError(
            f"{directory}: neither {split}-*.tar[.gz] nor {split}/<class>/ nor CIFAR-10 in it",
            _LAYOUT,
        )
    return found[0]


def _check_directory(directory: Path) -> None:
    try:
        empty = not any(directory.iterdir())
    except NotADirectoryError:
        raise DataError(f"{directory}: is a file, not a directory", _LAYOUT) from None
    except FileNotFoundError:
        raise DataError(f"{directory}: no such directory", _LAYOUT) from None
    except OSError as error:
        raise DataError(f"{directory}: cannot be listed ({error.strerror})", _LAYOUT) from None
    if empty:
        raise DataError(f"{directory}: is empty", _LAYOUT)


def _shard_paths(directory: Path, split: Split) -> list[Path]:
    return sorted(
        path for path in directory.glob(f"{split}-*") if path.name.endswith(SHARD_SUFFIXES)
    )


def _shards(directory: Path, split: Split, classes: Sequence[str] | None) -> TarShards:
    paths = _shard_paths(directory, split)
    if not paths:
        raise DataError(f"{directory}: no {split}-*.tar[.gz] in it", _LAYOUT)
    return TarShards(paths, read_classes(directory) or classes)


def _folder(directory: Path, split: Split, classes: Sequence[str] | None) -> ImageFolder:
    root = directory / split
    if not root.is_dir():
        raise DataError(f"{directory}: no {split}/<class>/ in it", _LAYOUT)
    training = directory / "train"
    if classes is None and split != "train" and training.is_dir():
        classes = class_directories(training)
    return ImageFolder(root, classes)


def _synthetic(settings: DataSettings, split: Split) -> SyntheticImages:
    """Validation has a tenth as many, at least one."""
    training = split == "train"
    return SyntheticImages(
        count=settings.synthetic_samples if training else max(1, settings.synthetic_samples // 10),
        classes=settings.synthetic_classes,
        image_size=settings.image_size,
        channels=settings.channels,
        salt=0 if training else 1,
    )
