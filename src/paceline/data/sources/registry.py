"""The kinds of data that `data.source` can name.

The module of a kind is imported when the name of the kind is used. `register_source` adds a kind
that is defined outside of the package, by a function that opens a split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.errors import DataError
from paceline.data.settings import SOURCES, DataSettings
from paceline.data.sources.base import Source, Split, checked_source

Opener = Callable[[DataSettings, Split, Sequence[str] | None], Source]


def named_validation(settings: DataSettings) -> str:
    """Returns `data.source` as text, for kinds of data that always have a validation set."""
    return f"data.source = {settings.source}"


@dataclass(frozen=True)
class SourceKind:
    """The functions that open one kind of data.

    Attributes:
        open_split: Function that opens one split. Its arguments are the settings, the split, the
            class names of the training split or None, and True if files may be written next to the
            data.
        validation: Function that returns a text that names the validation set of the data, or "" if
            it has none.
    """

    open_split: Callable[[DataSettings, Split, Sequence[str] | None, bool], Source]
    validation: Callable[[DataSettings], str] = named_validation


def register_source(name: str, opener: Opener) -> None:
    """Makes `data.source = NAME` open splits with `opener` in this process.

    Args:
        name: A new name.
        opener: Opens one split as a source. The arguments are the settings, the split and, for
            validation, the class names of the training split.
    """
    SOURCES.register(name, opener)


def source_kind(name: str) -> SourceKind:
    """Returns the functions that open the kind of data `name`."""
    kind = SOURCES.get(name, "data.source")
    if isinstance(kind, SourceKind):
        return kind
    opener: Opener = kind
    return SourceKind(
        lambda settings, split, classes, keep_index: checked_source(
            opener(settings, split, classes)
        )
    )


def _refuse(*_: object) -> Source:
    raise DataError(
        "data.source = 'python': the data was an object of a Python program and cannot be opened",
        "run that program again, or set --data-dir to a directory",
    )


PYTHON_OBJECT = SourceKind(_refuse)
