"""Which decoder prepares the samples of a split.

In: `data.decoder`, a source and a transform. Out: the preparer, whose `describe` says what was chosen
and, where that is not what was hoped for, why.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import ConfigError
from paceline.data.augmentation.augment import SquareTransform
from paceline.data.decoding.preparer import PillowPreparer, Preparer
from paceline.data.region.library import RegionUnavailableError, region_library
from paceline.data.region.preparer import RegionPreparer
from paceline.data.settings import DataSettings
from paceline.data.sources.source import Source

_JPEG_NAMES = (".jpg", ".jpeg")
_NAMES_LOOKED_AT = 64


def create_preparer(source: Source, transform: SquareTransform, settings: DataSettings) -> Preparer:
    """ConfigError where `data.decoder` names one that is not to be had here, or not on the host."""
    way = _WAYS.get(settings.decoder)
    if way is None:
        raise ConfigError(
            "data.decoder",
            settings.decoder,
            "decodes on a GPU; these batches are made on the host",
            f"set it to {', '.join(map(repr, _WAYS))}, or train with --device cuda",
        )
    return way(source, transform, settings)


def _auto(source: Source, transform: SquareTransform, settings: DataSettings) -> Preparer:
    """The library is not looked for, nor built, where no JPEG would need it."""
    if not _has_jpegs(source):
        return PillowPreparer(transform, settings.channels)
    try:
        return RegionPreparer(transform, settings.channels, region_library())
    except RegionUnavailableError as error:
        remark = f"Pillow decodes; no region decoder: {error.cause}"
        return PillowPreparer(transform, settings.channels, remark)


def _region(source: Source, transform: SquareTransform, settings: DataSettings) -> Preparer:
    try:
        return RegionPreparer(transform, settings.channels, region_library())
    except RegionUnavailableError as error:
        raise ConfigError(
            "data.decoder", settings.decoder, error.cause, f"{error.remedy}, or set it to 'auto'"
        ) from None


def _pillow(source: Source, transform: SquareTransform, settings: DataSettings) -> Preparer:
    return PillowPreparer(transform, settings.channels, "Pillow decodes")


_WAYS: dict[str, Callable[[Source, SquareTransform, DataSettings], Preparer]] = {
    "auto": _auto,
    "region": _region,
    "pillow": _pillow,
}


def _has_jpegs(source: Source) -> bool:
    """By their names, a few from all over the source: that costs no reading."""
    step = max(1, len(source) // _NAMES_LOOKED_AT)
    return any(source.name(i).lower().endswith(_JPEG_NAMES) for i in range(0, len(source), step))
