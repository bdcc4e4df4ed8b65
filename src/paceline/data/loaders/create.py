"""Creates the loaders that the settings ask for.

The decoder is a set that is resident on the device, the GPU's JPEG decoder, or the host. A loader's
`describe` says what was chosen and, where that is not what was hoped for, why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.extensions import load_part
from paceline.core.host import ask_for_connections
from paceline.data.augment import EvalTransform, SquareTransform, TrainTransform, extra_draws
from paceline.data.decode.decoder import Decoder, PillowDecoder, RegionUnavailableError
from paceline.data.device.streams import CopyingDecoder
from paceline.data.loaders.loader import EvalLoader, TrainLoader
from paceline.data.order import BatchPlan, SampleOrder, shard_groups
from paceline.data.own_augment import ImageAugment
from paceline.data.settings import DEVICE_DECODERS, HOST_DECODERS, DataSettings
from paceline.data.sources.base import Source

_JPEG_NAMES = (".jpg", ".jpeg")
_NAMES_LOOKED_AT = 64
# What creates decoders other than Pillow.
_REGION = "data.decode.region:create_decoder"
_NVJPEG = "data.device.gpu_decoder:create_decoder"
_RESIDENT = "data.device.resident:create_decoder"


def create_train_loader(
    source: Source,
    plan: BatchPlan,
    settings: DataSettings,
    *,
    seed: int,
    rank: int | Sequence[int],
    first_step: int,
    device: torch.device,
    augment: Callable[..., Any] | None = None,
) -> TrainLoader:
    """`augment`: the user's own augmentation (`own_augment`). DataError where decoding the set meets
    failing storage; ConfigError where `data.resident` = on, or `data.decoder`, cannot be done."""
    own = None if augment is None else ImageAugment(settings, augment)
    decoder = _create_decoder(source, own or TrainTransform(settings), settings, device)
    if isinstance(decoder, PillowDecoder) and device.type == "cuda":
        decoder = CopyingDecoder(decoder, device)
    order = SampleOrder(len(source), seed, groups=shard_groups(settings, source.shard_sizes))
    return TrainLoader(
        decoder,
        order,
        plan,
        rank=rank,
        first_step=first_step,
        max_corrupt_share=settings.max_corrupt_share,
    )


def create_eval_loader(
    source: Source,
    settings: DataSettings,
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    device: torch.device,
) -> EvalLoader:
    """Fails as `create_train_loader` does."""
    return EvalLoader(
        _create_decoder(source, EvalTransform(settings), settings, device),
        len(source),
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        max_corrupt_share=settings.max_corrupt_share,
    )


def _create_decoder(
    source: Source, transform: SquareTransform, settings: DataSettings, device: torch.device
) -> Decoder:
    if settings.decoder in DEVICE_DECODERS:
        ask_for_connections()  # a program may have a loader of ours, and no training
    resident, note = _resident_decoder(source, transform, settings, device)
    if resident is not None:
        return resident
    notes = (note, source.note)
    if settings.decoder not in DEVICE_DECODERS:
        return create_host_decoder(
            source, transform, settings, notes, pin_memory=device.type == "cuda"
        )
    host = create_host_decoder(source, transform, replace(settings, decoder="auto"))
    create = load_part(_NVJPEG, "data.decoder", settings.decoder)
    found: Decoder = create(host, transform, settings, device, notes)
    return found


def create_host_decoder(
    source: Source,
    transform: SquareTransform,
    settings: DataSettings,
    notes: Sequence[str] = (),
    *,
    pin_memory: bool = False,
) -> PillowDecoder:
    """ConfigError where `data.decoder` names one that is not to be had here, or not on the host.
    The library is not looked for, nor built, where no JPEG would need it."""
    wanted = settings.decoder
    if wanted not in HOST_DECODERS:
        raise ConfigError(
            "data.decoder",
            wanted,
            "decodes on a GPU; these batches are made on the host",
            f"set it to {', '.join(map(repr, HOST_DECODERS))}, or train with --device cuda",
        )
    channels, workers = settings.channels, settings.workers
    own_note = "Pillow decodes" if wanted == "pillow" else ""
    if wanted == "region" or (wanted == "auto" and _has_jpegs(source)):
        try:
            found: PillowDecoder = load_part(_REGION, "data.decoder", wanted)(
                source, transform, channels=channels, workers=workers, pin_memory=pin_memory,
                notes=notes,
            )  # fmt: skip
        except RegionUnavailableError as error:
            if wanted == "region":
                raise ConfigError(
                    "data.decoder", wanted, error.cause, f"{error.remedy}, or set it to 'auto'"
                ) from None
            own_note = f"Pillow decodes; no region decoder: {error.cause}"
        else:
            return found
    return PillowDecoder(
        source, transform, channels=channels, workers=workers, pin_memory=pin_memory,
        notes=(own_note, *notes),
    )  # fmt: skip


def _has_jpegs(source: Source) -> bool:
    """By their names, a few from all over the source: that costs no reading."""
    step = max(1, len(source) // _NAMES_LOOKED_AT)
    return any(source.name(i).lower().endswith(_JPEG_NAMES) for i in range(0, len(source), step))


def _resident_decoder(
    source: Source, transform: SquareTransform, settings: DataSettings, device: torch.device
) -> tuple[Decoder | None, str]:
    """A decoder of a set on the device; else None, and why if somebody could expect one. Extras and own
    augmentation are done on the host: a resident set has no place for them."""
    wanted = settings.resident
    which, remedy = "", ""
    if isinstance(transform, ImageAugment):
        which, remedy = "`augment` is", "use `device_augment`"
        if settings.decoder in DEVICE_DECODERS:
            raise ConfigError(
                "data.decoder", settings.decoder,
                "decodes on the GPU, and `augment` works on the host",
                f"{remedy}, or set data.decoder = 'auto'",
            )  # fmt: skip
    elif isinstance(transform, TrainTransform) and extra_draws(settings):
        which, remedy = "data.color_jitter and data.randaugment are", "leave these at 0"
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return None, ""
    if which and wanted == "on":
        raise ConfigError(
            "data.resident", "on", f"{which} done on the host",
            f"set data.resident = 'off', or {remedy}",
        )  # fmt: skip
    if which:
        return None, f"not resident: {which} done on the host"
    if settings.decoder in DEVICE_DECODERS:
        if wanted == "auto":  # the user chose the decoder, not residence
            return None, f"not resident: data.decoder = {settings.decoder}"
        raise ConfigError(
            "data.resident",
            wanted,
            f"is decoded once, by the host: data.decoder = {settings.decoder!r} would do nothing",
            "set data.resident = 'off', or data.decoder = 'auto'",
        )
    training = isinstance(transform, TrainTransform)
    create = load_part(_RESIDENT, "data.resident", wanted)
    found: tuple[Decoder | None, str] = create(source, settings, device, training)
    return found
