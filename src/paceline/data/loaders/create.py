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
from paceline.core.host import ask_for_connections
from paceline.data.augment import EvalTransform, SquareTransform, TrainTransform, extra_draws
from paceline.data.decode.decoder import Decoder, PillowDecoder, RegionDecoder
from paceline.data.decode.library import RegionUnavailableError, region_library
from paceline.data.device.gpu_decoder import GpuDecoder, check_source
from paceline.data.device.nvjpeg import NvJpeg
from paceline.data.device.resident import (
    PixelForm,
    ResidentDecoder,
    ResidentSet,
    UnequalSizesError,
    mib,
    resident_set,
)
from paceline.data.device.streams import CopyingDecoder
from paceline.data.loaders.loader import EvalLoader, TrainLoader
from paceline.data.order import BatchPlan, SampleOrder, shard_groups
from paceline.data.own_augment import ImageAugment
from paceline.data.settings import DEVICE_DECODERS, HOST_DECODERS, DataSettings
from paceline.data.sources.base import Source

_JPEG_NAMES = (".jpg", ".jpeg")
_NAMES_LOOKED_AT = 64
# Largest decoded split that `data.resident = "auto"` keeps on the device.
RESIDENT_MAX_MIB = 4096


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
    _prepare_cuda(settings)
    own = None if augment is None else ImageAugment(settings, augment)
    chosen = _choose_for_training(source, settings, device, own)
    decoder: Decoder
    if isinstance(chosen, ResidentSet):
        decoder = ResidentDecoder(chosen, settings)
    else:
        transform = own or TrainTransform(settings)
        decoder = _create_decoder(source, transform, settings, device, chosen)
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
    _prepare_cuda(settings)
    chosen = _choose(source, PixelForm.for_evaluation(settings), settings, device)
    decoder = (
        ResidentDecoder(chosen)
        if isinstance(chosen, ResidentSet)
        else _create_decoder(source, EvalTransform(settings), settings, device, chosen)
    )
    return EvalLoader(
        decoder,
        len(source),
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        max_corrupt_share=settings.max_corrupt_share,
    )


def _prepare_cuda(settings: DataSettings) -> None:
    """A program may have a loader of ours, and no training."""
    if settings.decoder in DEVICE_DECODERS:
        ask_for_connections()


def _create_decoder(
    source: Source,
    transform: SquareTransform,
    settings: DataSettings,
    device: torch.device,
    note: str,
) -> Decoder:
    """`note` goes with the description, and so does the source's own."""
    notes = (note, source.note)
    if settings.decoder not in DEVICE_DECODERS:
        return create_host_decoder(
            source, transform, settings, notes, pin_memory=device.type == "cuda"
        )
    check_source(source, settings)
    if device.type != "cuda":
        raise ConfigError(
            "data.decoder",
            settings.decoder,
            f"decodes on a GPU, but the device is {device}",
            "use run.device = 'cuda', or data.decoder = 'auto'",
        )
    nvjpeg = NvJpeg(device)
    host = create_host_decoder(source, transform, replace(settings, decoder="auto"))
    cutout = settings.cutout if transform.draws else 0
    return GpuDecoder(host, transform, nvjpeg, nvjpeg.describe(), device, cutout, notes)


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
            return RegionDecoder(
                source, transform, region_library(), channels=channels, workers=workers,
                pin_memory=pin_memory, notes=notes,
            )  # fmt: skip
        except RegionUnavailableError as error:
            if wanted == "region":
                raise ConfigError(
                    "data.decoder", wanted, error.cause, f"{error.remedy}, or set it to 'auto'"
                ) from None
            own_note = f"Pillow decodes; no region decoder: {error.cause}"
    return PillowDecoder(
        source, transform, channels=channels, workers=workers, pin_memory=pin_memory,
        notes=(own_note, *notes),
    )  # fmt: skip


def _has_jpegs(source: Source) -> bool:
    """By their names, a few from all over the source: that costs no reading."""
    step = max(1, len(source) // _NAMES_LOOKED_AT)
    return any(source.name(i).lower().endswith(_JPEG_NAMES) for i in range(0, len(source), step))


def _choose_for_training(
    source: Source, settings: DataSettings, device: torch.device, own: ImageAugment | None
) -> ResidentSet | str:
    """Extras and own augmentation are done on the host: a resident set has no place for them."""
    if own is not None and settings.decoder in DEVICE_DECODERS:
        raise ConfigError(
            "data.decoder", settings.decoder, "decodes on the GPU, and `augment` works on the host",
            "use `device_augment`, or set data.decoder = 'auto'",
        )  # fmt: skip
    if not extra_draws(settings) and own is None:
        return _choose(source, PixelForm.for_training(settings), settings, device)
    which, remedy = "data.color_jitter and data.randaugment are", "leave these at 0"
    if own is not None:
        which, remedy = "`augment` is", "use `device_augment`"
    if settings.resident == "on":
        raise ConfigError(
            "data.resident", "on", f"{which} done on the host",
            f"set data.resident = 'off', or {remedy}",
        )  # fmt: skip
    asked = settings.resident == "auto" and device.type == "cuda"
    return f"not resident: {which} done on the host" if asked else ""


def _choose(
    source: Source, form: PixelForm, settings: DataSettings, device: torch.device
) -> ResidentSet | str:
    """The resident set, or why there is none; nothing to say where nobody would expect one."""
    wanted = settings.resident
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return ""
    if settings.decoder in DEVICE_DECODERS:
        if wanted == "auto":  # the user chose the decoder, not residence
            return f"not resident: data.decoder = {settings.decoder}"
        raise ConfigError(
            "data.resident",
            wanted,
            f"is decoded once, by the host: data.decoder = {settings.decoder!r} would do nothing",
            "set data.resident = 'off', or data.decoder = 'auto'",
        )
    if not source.is_constant:
        if wanted == "auto":
            return "not resident: the images change between reads"
        raise ConfigError(
            "data.resident", wanted, f"{source.kind} gives other images at every read",
            "set data.resident = 'off', or move random transforms to `augment`",
        )  # fmt: skip
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    shape = form.shape(source)
    if shape is None:
        return "not resident: no sample can be decoded"  # which the threads report
    size = mib(len(source), shape)
    if wanted == "auto" and size > RESIDENT_MAX_MIB:
        return f"not resident: {size:,.0f} MiB, over {RESIDENT_MAX_MIB:,}"
    try:
        return resident_set(source, form, shape, settings.workers, device)
    except UnequalSizesError as error:
        if wanted == "auto":
            return f"not resident: {error}"
        raise ConfigError(
            "data.resident",
            wanted,
            f"random_resized_crop on the device needs images of one size, there are {error}",
            "set data.resident = 'off', or data.augment = 'pad_crop'",
        ) from None
    except torch.OutOfMemoryError:
        # Not off by itself: ranks, and a resumed run, must not go different ways by chance.
        raise ConfigError(
            "data.resident",
            wanted,
            f"no room for {size:,.0f} MiB on {device}",
            "set data.resident = 'off'",
        ) from None
