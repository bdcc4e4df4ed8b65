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
    """Returns `data.source` as evidence of a validation set, for kinds that always have one."""
    return f"data.source = {settings.source}"


@dataclass(frozen=True)
class SourceKind:
    """Functions for one kind of data.

    Attributes:
        open_split: Opens one split. The arguments are the settings, the split, the class names of
            the training split or None, and False if nothing must be written next to the data.
        validation: Returns the evidence that the data has a validation set, or "" if it has none.
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
    """Returns the kind of data with this name."""
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
        "the data is a Python object, which the settings cannot open",
        "use the program that made it, or give --data-dir",
    )


PYTHON_OBJECT = SourceKind(_refuse)
