"""Labels from files next to the images.

If a validation folder has no class folders, such as ImageNet's, the labels are read from one of
these files, next to `val/` or inside:

| file | a line is |
| --- | --- |
| `val.txt` (Caffe) | file name, then the class index in sorted-wnid order, or the wnid |
| `LOC_val_solution.csv` (Kaggle) | image id, `wnid x y x y …` |
| `imagenet_2012_validation_synset_labels.txt`, `synset_labels.txt` | wnid, in the order of file names |
| `val_annotations.txt` (Tiny-ImageNet) | file name, wnid and box, separated by tabs |

Hugging Face's `metadata.csv` has a header with the columns `file_name` and `label`. Each line of
`metadata.jsonl` is an object with these keys. Labels are class indices or names of classes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.files import LARGEST_BYTES, open_regular, read_regular
from paceline.core.untrusted import ParseError, parse_json
from paceline.data.sources.classes import numbered_classes

ANNOTATIONS = "val_annotations.txt"
_INDEXED, _KAGGLE = "val.txt", "LOC_val_solution.csv"
FILE_NAMES = (
    _INDEXED,
    _KAGGLE,
    "imagenet_2012_validation_synset_labels.txt",
    "synset_labels.txt",
    ANNOTATIONS,
)
# For label files with image names: separator after the name, separator after the class, header lines.
_NAMED = {_INDEXED: (" ", "\n", 0), _KAGGLE: (",", " ", 1), ANNOTATIONS: ("\t", "\t", 0)}
# In Kaggle's ImageNet, this folder has the images. The label files are next to the folder `ILSVRC`.
KAGGLE_FOLDER = Path("ILSVRC", "Data", "CLS-LOC")


def find_label_file(root: Path) -> Path | None:
    """Returns the first known label file next to `root`, in `root`, or in Kaggle's folder, or None."""
    places = [root.parent, root]
    above = root.absolute().parents
    if above[0].parts[-len(KAGGLE_FOLDER.parts) :] == KAGGLE_FOLDER.parts:
        places.append(above[len(KAGGLE_FOLDER.parts)])
    for name in FILE_NAMES:
        for place in places:
            if (place / name).is_file():
                return place / name
    return None


def read_flat_labels(path: Path, images: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Reads the label of each image.

    Args:
        path: A label file, whose name is one of `FILE_NAMES`.
        images: Sorted file names of the images.
        classes: Names of the classes.

    Returns:
        The class index of each image.

    Raises:
        DataError: If a line is invalid, or an image has no line.
    """
    try:
        lines = read_regular(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})", "check the file") from None
    known = {name: index for index, name in enumerate(classes)}
    if path.name in _NAMED:
        return _by_name(path, lines, images, known)
    if len(lines) != len(images):
        raise DataError(
            f"{path}: {len(lines)} labels for {len(images)} images in the order of names",
            "the folder must have exactly the images of the file",
        )
    return [_class(path, n, line, known) for n, line in enumerate(lines, start=1)]


def _by_name(
    path: Path, lines: list[str], images: Sequence[str], classes: Mapping[str, int]
) -> list[int]:
    after_name, after_class, header = _NAMED[path.name]
    labels: dict[str, int] = {}
    for number, line in enumerate(lines[header:], start=1 + header):
        name, _, rest = line.partition(after_name)
        text = rest.partition(after_class)[0].strip()
        labels[Path(name).name] = _class(path, number, text, classes, path.name == _INDEXED)
    keys = [Path(name).stem if path.name == _KAGGLE else Path(name).name for name in images]
    missing = [name for name, key in zip(images, keys, strict=True) if key not in labels]
    if missing:
        raise DataError(
            f"{path}: no label for {len(missing)} of {len(images)} images, such as {missing[0]}",
            "complete the file, or remove the images",
        )
    return [labels[key] for key in keys]


def _class(
    path: Path, number: int, text: str, classes: Mapping[str, int], numbers: bool = False
) -> int:
    if text in classes:
        return classes[text]
    if numbers and text.isdigit() and len(text) < 10 and int(text) < len(classes):
        return int(text)
    raise DataError(
        f"{path}:{number}: {text!r} is none of the {len(classes)} classes",
        "the training split, or classes.json, names the classes",
    )


_MOST_CLASSES = 1_000_000
_METADATA_FILES = ("metadata.csv", "metadata.jsonl")
_NAME, _LABEL = "file_name", "label"
_METADATA_FORM = "the file needs file_name and label, as columns (csv) or keys of each line (jsonl)"
_LONGEST_LINE = 1 << 20


def find_metadata(root: Path) -> Path | None:
    """Returns the metadata file of `root` if it has file names and labels, else None."""
    return next((root / name for name in _METADATA_FILES if is_metadata(root / name)), None)


def _text_file(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_regular(path, LARGEST_BYTES), encoding="utf-8-sig", newline="")


def is_metadata(path: Path) -> bool:
    """Returns True if the header or the first row of a metadata file has file name and label."""
    try:
        with _text_file(path) as file:
            if path.suffix == ".csv":
                return {_NAME, _LABEL} <= set(next(csv.reader(file), ()))
            first = parse_json(file.readline(_LONGEST_LINE).encode())
            return isinstance(first, dict) and {_NAME, _LABEL} <= first.keys()
    except (OSError, UnicodeDecodeError, csv.Error, ParseError):
        return False


def read_metadata(path: Path) -> list[tuple[str, str]]:
    """Returns file name and label of each row. For an invalid row, raises DataError with its number."""
    rows: list[tuple[str, str]] = []
    try:
        for name, label in _metadata_rows(path):
            line = len(rows) + first_row(path)
            if not name or not label:
                raise DataError(f"{path}: row {line} has no file_name or no label", _METADATA_FORM)
            place = Path(name)
            if place.is_absolute() or ".." in place.parts or "\0" in name:
                raise DataError(
                    f"{path}: row {line}: {name!r} is not below the folder", _METADATA_FORM
                )
            rows.append((name, label.strip()))
    except (OSError, UnicodeDecodeError, csv.Error, ParseError) as error:
        raise DataError(f"{path}: cannot be read ({error})", _METADATA_FORM) from None
    if not rows:
        raise DataError(f"{path}: has no row", _METADATA_FORM)
    return rows


def first_row(path: Path) -> int:
    """Returns the line number of the first row of data, which follows the header in a csv file."""
    return 2 if path.suffix == ".csv" else 1


def _metadata_rows(path: Path) -> Iterator[tuple[str | None, str | None]]:
    with _text_file(path) as file:
        if path.suffix == ".csv":
            for row in csv.DictReader(file):
                yield row.get(_NAME), row.get(_LABEL)
            return
        for line in file:
            if line.strip():
                parsed = parse_json(line.encode())
                entry = parsed if isinstance(parsed, dict) else {}
                name, label = entry.get(_NAME), entry.get(_LABEL)
                label = str(label) if type(label) is int else label
                yield (
                    name if isinstance(name, str) else None,
                    label if isinstance(label, str) else None,
                )


def metadata_labels(
    path: Path, labels: Sequence[str], classes: Sequence[str] | None
) -> tuple[list[int], Sequence[str]]:
    """Converts labels to class indices.

    Args:
        path: The metadata file, for messages.
        labels: Class indices or class names, as text.
        classes: Names of the classes. None derives them from the labels: all indices up to the
            largest, or the sorted names.

    Returns:
        The class indices, and the names of the classes.

    Raises:
        DataError: If a label is invalid.
    """
    digits = all(label.isascii() and label.isdigit() and len(label) < 10 for label in labels)
    if classes is None and digits:
        highest = max(map(int, labels))
        if highest >= _MOST_CLASSES:
            raise DataError(f"{path}: label {highest} is too large", "use 0, 1, 2 … or class names")
        classes = numbered_classes(highest + 1)
    elif classes is None:
        classes = sorted(set(labels))
    known = {name: index for index, name in enumerate(classes)}
    rows = enumerate(labels, start=first_row(path))
    return [_class(path, row, label, known, numbers=digits) for row, label in rows], classes
