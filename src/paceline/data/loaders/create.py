"""Creates the data loaders that the settings ask for.

Batches come from images that stay decoded in GPU memory, from the GPU's JPEG decoder, or from a
decoder on the host. The description of a loader names the decoder, and the reason if a faster one
cannot be used.
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
_CHECKED_NAMES = 64
# Functions that create decoders other than Pillow's.
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
    """Creates a loader of training batches.

    Args:
        source: The training data.
        plan: Determines the samples of each step and micro-batch.
        settings: Settings of the input pipeline.
        seed: Seed of the sample order and the augmentation.
        rank: The rank whose micro-batches are loaded, or several ranks.
        first_step: The first step to load.
        device: The training device.
        augment: The user's function that augments an image on the host (see `own_augment`).

    Raises:
        DataError: If images that should stay in GPU memory cannot be read.
        ConfigError: If `data.resident = on` or `data.decoder` is impossible with this data or
            device.
    """
    transform = TrainTransform(settings) if augment is None else ImageAugment(settings, augment)
    decoder = _create_decoder(source, transform, settings, device)
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
    """Creates a loader of this rank's evaluation batches. Raises the same errors as for training."""
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
    on_device = settings.decoder in DEVICE_DECODERS
    if on_device:
        ask_for_connections()  # needed if a program uses a loader but no trainer
    resident, note = _resident_decoder(source, transform, settings, device)
    if resident is not None:
        return resident
    notes = (note, source.note)
    if not on_device:
        pinned = device.type == "cuda"
        return create_host_decoder(source, transform, settings, notes, pin_memory=pinned)
    host = create_host_decoder(source, transform, replace(settings, decoder="auto"))
    create = load_part(_NVJPEG, "data.decoder", settings.decoder)
    decoder: Decoder = create(host, transform, settings, device, notes)
    return decoder


def create_host_decoder(
    source: Source,
    transform: SquareTransform,
    settings: DataSettings,
    notes: Sequence[str] = (),
    *,
    pin_memory: bool = False,
) -> PillowDecoder:
    """Creates a decoder on the host. Builds its C library only if the source has JPEGs.

    Args:
        source: The samples.
        transform: Converts a decoded image to the square of pixels.
        settings: Settings of the input pipeline.
        notes: Notes to add to the decoder's description.
        pin_memory: Allocates batches in pinned memory.

    Raises:
        ConfigError: If `data.decoder` is not available on this machine, or decodes on a GPU.
    """
    wanted = settings.decoder
    if wanted not in HOST_DECODERS:
        raise ConfigError(
            "data.decoder", wanted, "decodes on a GPU, but these batches are made on the host",
            f"use {', '.join(map(repr, HOST_DECODERS))}, or train with --device cuda",
        )  # fmt: skip
    options: dict[str, Any] = {
        "channels": settings.channels, "workers": settings.workers, "pin_memory": pin_memory
    }  # fmt: skip
    own_note = "Pillow decodes" if wanted == "pillow" else ""
    if wanted == "region" or (wanted == "auto" and _has_jpegs(source)):
        create = load_part(_REGION, "data.decoder", wanted)
        try:
            decoder: PillowDecoder = create(source, transform, notes=notes, **options)
            return decoder
        except RegionUnavailableError as error:
            if wanted == "region":
                raise ConfigError(
                    "data.decoder", wanted, error.cause, f"{error.remedy}, or set it to 'auto'"
                ) from None
            own_note = f"Pillow decodes; no region decoder: {error.cause}"
    return PillowDecoder(source, transform, notes=(own_note, *notes), **options)


def _has_jpegs(source: Source) -> bool:
    """Returns True if the names of some samples suggest that the source has JPEGs."""
    step = max(1, len(source) // _CHECKED_NAMES)
    return any(source.name(i).lower().endswith(_JPEG_NAMES) for i in range(0, len(source), step))


def _resident_decoder(
    source: Source, transform: SquareTransform, settings: DataSettings, device: torch.device
) -> tuple[Decoder | None, str]:
    """Returns a decoder that keeps all images in GPU memory, or None and the reason why not."""
    own = isinstance(transform, ImageAugment)
    training = isinstance(transform, TrainTransform)
    if own and settings.decoder in DEVICE_DECODERS:
        raise ConfigError(
            "data.decoder", settings.decoder, "decodes on the GPU, but `augment` works on the host",
            "use `device_augment`, or set data.decoder = 'auto'",
        )  # fmt: skip
    wanted = settings.resident
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return None, ""
    problem, remedy = "", ""
    if own:
        problem, remedy = "`augment` is done on the host", "use `device_augment`"
    elif training and extra_draws(settings):
        problem = "data.color_jitter and data.randaugment are done on the host"
        remedy = "leave these at 0"
    elif settings.decoder in DEVICE_DECODERS:
        problem = f"data.decoder = {settings.decoder!r} decodes every batch"
        remedy = "set data.decoder = 'auto'"
    elif training and settings.augment == "random_resized_crop":
        problem = "data.augment = 'random_resized_crop' is done on the host"
        remedy = "set data.augment = 'pad_crop'"
    if problem and wanted == "on":
        remedy = f"set data.resident = 'off', or {remedy}"
        raise ConfigError("data.resident", wanted, problem, remedy)
    if problem:
        return None, f"not resident: {problem}"
    create = load_part(_RESIDENT, "data.resident", wanted)
    decoder: tuple[Decoder | None, str] = create(source, settings, device, training)
    return decoder
