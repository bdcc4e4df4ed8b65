"""Kinds of data, by the names that `data.source` takes.

The module of a kind is imported when its name is used. `register_source` adds a kind from outside the
package: a function that opens a split is all that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.errors import DataError
from paceline.data.settings import SOURCES, DataSettings
from paceline.data.sources.base import Source, Split, checked_source

Opener = Callable[[DataSettings, Split, Sequence[str] | None], Source]


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

    open_split: Callable[[DataSettings, Split, Sequence[str] | None, bool], Source]
    validation: Callable[[DataSettings], str] = named_validation


def register_source(name: str, opener: Opener) -> None:
    """Makes `data.source = NAME` open splits by `opener` in this process. It gets the settings, the split
    and, for validation, the classes of the training split."""
    SOURCES.register(name, opener)


def source_kind(name: str) -> SourceKind:
    """Returns what `data.source = name` stands for."""
    found = SOURCES.get(name, "data.source")
    if isinstance(found, SourceKind):
        return found
    opener: Opener = found
    return SourceKind(
        lambda settings, split, classes, keep_index: checked_source(
            opener(settings, split, classes)
        )
    )


def _refuse(*_: object) -> Source:
    raise DataError(
        "the data was given as a Python object, which the settings cannot open",
        "use the program that made it, or give --data-dir",
    )


PYTHON_OBJECT = SourceKind(_refuse)
