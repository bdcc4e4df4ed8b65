"""Labels from files beside the images.

A validation folder without class folders, as ImageNet's is published, takes its labels from one of these
files, beside `val/` or in it:

| file | a line is |
| --- | --- |
| `val.txt` (Caffe) | file name, then the class index in sorted-wnid order, or the wnid |
| `LOC_val_solution.csv` (Kaggle) | image id, `wnid x y x y …` |
| `imagenet_2012_validation_synset_labels.txt`, `synset_labels.txt` | wnid, by order of file name |
| `ILSVRC2012_validation_ground_truth.txt` (devkit) | the devkit's class number, by order of file name |
| `val_annotations.txt` (Tiny-ImageNet) | file name, wnid and box, separated by tabs |

The devkit's numbers are not sorted, so they need `map_clsloc.txt` (wnid, number, name).

Hugging Face's `metadata.csv` has a header with the columns `file_name` and `label`, and `metadata.jsonl`
an object with these keys in each line; labels are class indices, or names of classes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.files import LARGEST_BYTES, open_regular, read_regular
from paceline.core.untrusted import ParseError, parse_json
from paceline.data.sources.classes import numbered_classes

_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_NUMBER_MAP = "map_clsloc.txt"
ANNOTATIONS = "val_annotations.txt"
FILE_NAMES = (
    "val.txt",
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "synset_labels.txt",
    _GROUND_TRUTH,
    ANNOTATIONS,
)
_DEVKIT = Path("ILSVRC2012_devkit_t12", "data")
# Kaggle has the images of ImageNet in this folder, and the labels beside its first part.
KAGGLE_FOLDER = Path("ILSVRC", "Data", "CLS-LOC")


def find_label_file(root: Path) -> Path | None:
    """The first of the known files, beside `root` or in it, or at the place of Kaggle or the devkit."""
    places = [root.parent, root, root.parent / _DEVKIT]
    above = root.absolute().parents
    if above[0].parts[-len(KAGGLE_FOLDER.parts) :] == KAGGLE_FOLDER.parts:
        places.append(above[len(KAGGLE_FOLDER.parts)])
    for name in FILE_NAMES:
        for place in places:
            if (place / name).is_file():
                return place / name
    return None


def read_flat_labels(path: Path, images: Sequence[str], classes: Sequence[str]) -> list[int]:
    """A label for each of `images`, sorted file names. DataError names the line that is wrong."""
    lines, known = _lines(path), {name: index for index, name in enumerate(classes)}
    if path.name == "val.txt":
        return _by_name(path, lines, images, known, (" ", ""), str, numbers=True)
    if path.name == "LOC_val_solution.csv":
        return _by_name(
            path, lines, images, known, (",", " "), lambda name: Path(name).stem, header=1
        )
    if path.name == ANNOTATIONS:
        return _by_name(path, lines, images, known, ("\t", "\t"), lambda name: Path(name).name)
    if path.name == _GROUND_TRUTH:
        return _by_devkit_number(path, lines, images, known)
    return _by_place(path, lines, images, known)


def _by_name(
    path: Path,
    lines: list[str],
    images: Sequence[str],
    classes: Mapping[str, int],
    ends: tuple[str, str],
    key: Callable[[str], str],
    *,
    header: int = 0,
    numbers: bool = False,
) -> list[int]:
    """A line is a name and a class; `ends` are what follows each. `key` is the name of an image there."""
    table: dict[str, int] = {}
    for number, line in enumerate(lines[header:], start=1 + header):
        name, _, rest = line.partition(ends[0])
        text = rest.partition(ends[1])[0] if ends[1] else rest.strip()
        table[Path(name).name] = _class(path, number, text, classes, numbers)
    missing = [name for name in images if key(name) not in table]
    if missing:
        raise DataError(
            f"{path}: no label for {len(missing)} of {len(images)} images, such as {missing[0]}",
            "complete the file, or remove the images",
        )
    return [table[key(name)] for name in images]


def _by_place(
    path: Path, lines: list[str], images: Sequence[str], classes: Mapping[str, int]
) -> list[int]:
    _check_count(path, lines, images)
    return [_class(path, n, line, classes) for n, line in enumerate(lines, start=1)]


def _by_devkit_number(
    path: Path, lines: list[str], images: Sequence[str], classes: Mapping[str, int]
) -> list[int]:
    _check_count(path, lines, images)
    map_path = path.parent / _NUMBER_MAP
    if not map_path.is_file():
        raise DataError(
            f"{path}: numbers classes in the devkit's own order, and {_NUMBER_MAP} is not there",
            f"put {_NUMBER_MAP} (wnid, number, name) or val.txt beside it"
            + (" (docs/data.md makes it from meta.mat)" * (path.parent / "meta.mat").is_file()),
        )
    known: dict[str, int] = {}
    for number, line in enumerate(_lines(map_path), start=1):
        wnid, _, rest = line.partition(" ")
        known[rest.partition(" ")[0]] = _class(map_path, number, wnid, classes)
    labels = []
    for number, line in enumerate(lines, start=1):
        if line not in known:
            raise DataError(f"{path}:{number}: {line!r} is not in {_NUMBER_MAP}", "check both")
        labels.append(known[line])
    return labels


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


def _check_count(path: Path, lines: list[str], images: Sequence[str]) -> None:
    if len(lines) != len(images):
        raise DataError(
            f"{path}: {len(lines)} labels for {len(images)} images in order of name",
            "all images must be there, and no others; val.txt names its images",
        )


def _lines(path: Path) -> list[str]:
    try:
        return read_regular(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})", "check the file") from None


_MOST_CLASSES = 1_000_000
_METADATA_FILES = ("metadata.csv", "metadata.jsonl")
_COLUMNS = ("file_name", "label")
_METADATA_FORM = (
    "it has file_name and label: columns of a csv file, keys of each line of a jsonl file"
)
_LONGEST_LINE = 1 << 20


def find_metadata(root: Path) -> Path | None:
    """The metadata of `root` with file names and labels; without labels it is of no use here."""
    return next((root / name for name in _METADATA_FILES if is_metadata(root / name)), None)


def _text_file(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_regular(path, LARGEST_BYTES), encoding="utf-8-sig", newline="")


def is_metadata(path: Path) -> bool:
    """Returns True if the file has file names and labels."""
    try:
        with _text_file(path) as file:
            if path.suffix == ".csv":
                return set(_COLUMNS) <= set(next(csv.reader(file), ()))
            first = parse_json(file.readline(_LONGEST_LINE).encode())
            return isinstance(first, dict) and set(_COLUMNS) <= first.keys()
    except (OSError, UnicodeDecodeError, csv.Error, ParseError):
        return False


def read_metadata(path: Path) -> list[tuple[str, str]]:
    """File name and label of each row. DataError names the row that is wrong."""
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
    """The number of the line with the first file name; a csv file has a header."""
    return 2 if path.suffix == ".csv" else 1


def _metadata_rows(path: Path) -> Iterator[tuple[str | None, str | None]]:
    with _text_file(path) as file:
        if path.suffix == ".csv":
            for row in csv.DictReader(file):
                yield row.get(_COLUMNS[0]), row.get(_COLUMNS[1])
            return
        for line in file:
            if line.strip():
                found = parse_json(line.encode())
                name, label = (
                    found.get(key) if isinstance(found, dict) else None for key in _COLUMNS
                )
                label = str(label) if type(label) is int else label
                yield (
                    name if isinstance(name, str) else None,
                    label if isinstance(label, str) else None,
                )


def metadata_labels(
    path: Path, labels: Sequence[str], classes: Sequence[str] | None
) -> tuple[list[int], Sequence[str]]:
    """A number for each label, and the classes: those given, the numbers up to the largest, or the
    sorted names."""
    digits = all(label.isascii() and label.isdigit() and len(label) < 10 for label in labels)
    if classes is None and digits:
        highest = max(map(int, labels))
        if highest >= _MOST_CLASSES:
            raise DataError(f"{path}: label {highest}", "labels are 0, 1, 2 …, or names of classes")
        classes = numbered_classes(highest + 1)
    elif classes is None:
        classes = sorted(set(labels))
    known = {name: index for index, name in enumerate(classes)}
    rows = enumerate(labels, start=first_row(path))
    return [_class(path, row, label, known, numbers=digits) for row, label in rows], classes
