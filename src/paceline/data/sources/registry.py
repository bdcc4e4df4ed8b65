"""Kinds of data, by the names that `data.source` takes.

The module of a kind is imported when its name is used. `register_source` adds a kind from outside the
package: a function that opens a split is all that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.errors import DataError
from paceline.core.extensions import load_chosen
from paceline.core.imports import PYTHON
from paceline.data.settings import SOURCES, DataSettings
from paceline.data.sources.base import Source, Split

OpenSplit = Callable[[DataSettings, Split, Sequence[str] | None, bool], Source]


def named_validation(settings: DataSettings) -> str:
    """The sign of a validation set, for kinds that always have one."""
    return f"data.source = {settings.source}"


@dataclass(frozen=True)
class SourceKind:
    """What `data.source = NAME` stands for.

    Attributes:
        open_split: Opens one split. Its arguments are the settings, the split, the classes of the
            training split if they are known, and False if nothing may be written beside the data.
        validation: Returns by what the data has a validation set, "" if it has none.
    """

    open_split: OpenSplit
    validation: Callable[[DataSettings], str] = named_validation


_registered: dict[str, SourceKind] = {}


def register_source(name: str, open_split: OpenSplit) -> None:
    """Makes `data.source = name` open splits by `open_split` (see `SourceKind`)."""
    SOURCES[name] = ""
    _registered[name] = SourceKind(open_split)


def source_kind(name: str) -> SourceKind:
    """Returns what `data.source = name` stands for."""
    if name in _registered:
        return _registered[name]
    if name == PYTHON:
        raise DataError(
            "the data was given as a Python object, which the settings cannot open",
            "use the program that made it, or give --data-dir",
        )
    kind: SourceKind = load_chosen("data.sources", SOURCES, name).KIND
    return kind
