"""Reads class names from `classes.json`, or uses the class indices as names.

`classes.json` is a list of {"cls": index, "name": text}, a list of names, or an object {name:
index}. The indices must be 0, 1, 2 … without gaps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.core.files import read_regular
from paceline.core.untrusted import ParseError, parse_json

CLASSES_FILE = "classes.json"
_FORM = 'write it as [{"cls": 0, "name": "…"}, …] or {"name": 0, …}'


def read_classes(directory: Path) -> list[str] | None:
    """Returns the class names from `classes.json` in a directory, or None without such a file."""
    path = directory / CLASSES_FILE
    try:
        content = parse_json(read_regular(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", "check it") from None
    except ParseError as error:
        raise DataError(f"{path}: is not JSON ({error})", _FORM) from None
    names = dict(_pairs(content, path))
    if len(names) != len(content) or sorted(names) != list(range(len(names))) or not names:
        raise DataError(f"{path}: class indices must be 0, 1, 2 … each once", _FORM)
    return [names[index] for index in range(len(names))]


def numbered_classes(count: int) -> list[str]:
    """Returns the class indices 0 to `count` − 1 as names."""
    return [str(index) for index in range(count)]


def _pairs(content: Any, path: Path) -> list[tuple[int, str]]:
    pairs: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        pairs = [(index, name) for name, index in content.items()]
    elif isinstance(content, list):
        for position, item in enumerate(content):
            if isinstance(item, dict):
                pairs.append((item.get("cls"), item.get("name", item.get("wnid"))))
            else:
                pairs.append((position, item))
    for index, name in pairs:
        if type(index) is not int or not isinstance(name, str):
            raise DataError(f"{path}: class {name!r} with index {index!r}", _FORM)
    if not pairs:
        raise DataError(f"{path}: contains no classes", _FORM)
    return pairs
