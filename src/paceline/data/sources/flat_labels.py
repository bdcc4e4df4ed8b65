"""Labels of a validation folder that has no class folders, as ImageNet's is published.

In: `val/ILSVRC2012_val_00000001.JPEG` … and one of the label files that go with it in practice, beside `val/`
or in it. Out: a class for each image. The classes must be known, in the sorted order of their names.

| file | a line is |
| --- | --- |
| `val.txt` (Caffe) | file name, class index in sorted-wnid order or wnid |
| `LOC_val_solution.csv` (Kaggle) | image id, `wnid x y x y …` |
| `imagenet_2012_validation_synset_labels.txt`, `synset_labels.txt` | wnid, in the order of file names |
| `ILSVRC2012_validation_ground_truth.txt` (devkit) | the devkit's own class number, in the order of file names; needs `map_clsloc.txt` (wnid, number, name), since these numbers are not sorted |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.core.errors import DataError

_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_NUMBER_MAP = "map_clsloc.txt"
FILE_NAMES = (
    "val.txt",
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "synset_labels.txt",
    _GROUND_TRUTH,
)


def find_label_file(root: Path) -> Path | None:
    """The first of the known files, beside `root` or in it."""
    for name in FILE_NAMES:
        for place in (root.parent, root):
            if (place / name).is_file():
                return place / name
    return None


def read_flat_labels(path: Path, images: Sequence[str], classes: Sequence[str]) -> list[int]:
    """A label for each of `images`, sorted file names. DataError names the line that is wrong."""
    lines, known = _lines(path), {name: index for index, name in enumerate(classes)}
    reader: Callable[[Path, list[str], Sequence[str], Mapping[str, int]], list[int]] = {
        "val.txt": _by_name,
        "LOC_val_solution.csv": _by_kaggle_id,
        _GROUND_TRUTH: _by_devkit_number,
    }.get(path.name, _by_place)
    return reader(path, lines, images, known)


def _by_name(
    path: Path, lines: list[str], images: Sequence[str], classes: Mapping[str, int]
) -> list[int]:
    table: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        name, _, text = line.partition(" ")
        index = _class(path, number, text.strip(), classes, numbers=True)
        table[Path(name).name] = index
    return _looked_up(path, table, images, str)


def _by_kaggle_id(
    path: Path, lines: list[str], images: Sequence[str], classes: Mapping[str, int]
) -> list[int]:
    table: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=2):
        identity, _, boxes = line.partition(",")
        table[identity] = _class(path, number, boxes.split(" ")[0], classes)
    return _looked_up(path, table, images, lambda name: Path(name).stem)


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
            f"put {_NUMBER_MAP} (wnid, number, name) or val.txt beside it",
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


def _looked_up(
    path: Path, table: dict[str, int], images: Sequence[str], key: Callable[[str], str]
) -> list[int]:
    missing = [name for name in images if key(name) not in table]
    if missing:
        raise DataError(
            f"{path}: no label for {len(missing)} of {len(images)} images, such as {missing[0]}",
            "complete the file, or remove the images",
        )
    return [table[key(name)] for name in images]


def _check_count(path: Path, lines: list[str], images: Sequence[str]) -> None:
    if len(lines) != len(images):
        raise DataError(
            f"{path}: {len(lines)} labels for {len(images)} images in order of name",
            "all images must be there, and no others; val.txt names its images",
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})", "check the file") from None
