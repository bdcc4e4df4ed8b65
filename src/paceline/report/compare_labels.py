"""Names for the rows of a comparison: the settings in which the rows differ, as few as tell them apart.

In: the settings of each row. Out: the names of those that differ, the few that name the rows, a
label for each row, and what all rows have in common.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.report.compare_runs import GLOBAL_BATCH, RANKS
from paceline.report.quantities import shown

Settings = Mapping[str, Any]

UNSET = "unset"
# Where several settings would name the rows alike, the earliest here does: what a reader thinks in.
_TELLING = ("optim.name", "model.name", GLOBAL_BATCH, "run.epochs")
_SECTIONS = ("optim", "precision", "model", "data", "run", "comm", RANKS, "checkpoint")
# Follow from others, or matter for speed alone.
_DULL = ("run.batch_size", "run.threads", "data.workers", "data.prefetch_batches")


def identity(settings: Settings) -> str:
    """Equal for equal settings, whatever their order; 1 and 1.0 are the same."""
    return json.dumps({key: _plain(value) for key, value in settings.items()}, sort_keys=True)


def differing(rows: Sequence[Settings]) -> list[str]:
    """The settings that are not the same in all rows, the most telling first."""
    names = {name: None for settings in rows for name in settings}
    return sorted(
        (name for name in names if len({_value(settings, name) for settings in rows}) > 1),
        key=_dullness,
    )


def naming(rows: Sequence[Settings], different: Sequence[str]) -> list[str]:
    """The few of `different` that tell all rows apart that all of them do."""
    chosen = list(different)
    apart = _distinct(rows, chosen)
    for name in reversed(different):
        fewer = [other for other in chosen if other != name]
        if _distinct(rows, fewer) == apart:
            chosen = fewer
    return chosen


def label(settings: Settings, names: Sequence[str], short: Mapping[str, str]) -> str:
    """`optim.name=lars global_batch_size=2500`."""
    return " ".join(f"{short[name]}={value_text(settings, name)}" for name in names)


def short_names(known: Iterable[str]) -> dict[str, str]:
    """`optim.momentum` → `momentum`, unless another section has a setting of that name."""
    names = list(known)
    last = [name.rpartition(".")[2] for name in names]
    return {
        name: key if last.count(key) == 1 else name for name, key in zip(names, last, strict=True)
    }


def value_text(settings: Settings, name: str) -> str:
    """A value in one word; one that TOML leaves out because it is unset is called so."""
    if name not in settings:
        return UNSET
    value = settings[name]
    if isinstance(value, list | tuple):
        return f"[{','.join(shown(item) for item in value)}]"
    if isinstance(value, float):  # in full: two rows that differ must not read alike
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return '""' if value == "" else shown(value)


def _distinct(rows: Sequence[Settings], names: Sequence[str]) -> int:
    return len({tuple(_value(settings, name) for name in names) for settings in rows})


def _value(settings: Settings, name: str) -> str:
    return json.dumps(_plain(settings[name])) if name in settings else UNSET


def _plain(value: Any) -> Any:
    """What JSON can hold: dates of TOML as text, whole numbers as the floats they stand for."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    return float(value) if isinstance(value, int | float) else str(value)


def _dullness(name: str) -> tuple[int, int, str]:
    if name in _TELLING:
        return 0, _TELLING.index(name), name
    if name in _DULL:
        return 2, _DULL.index(name), name
    section = name.partition(".")[0]
    return 1, _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), name
