"""Which loader serves a split: a resident set, the GPU's own decoder, or threads on the host.

In: a source, `data.resident`, `data.decoder` and the training device. Out: the loader, whose `describe`
says what was chosen and, where that is not what was hoped for, why.
"""

from __future__ import annotations

import torch

from paceline.core.errors import ConfigError
from paceline.core.gpu_connections import ask_for_connections
from paceline.data.augmentation.augment_extras import extra_draws
from paceline.data.batch_plan import BatchPlan
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.on_device.copied_ahead import CopiedAhead
from paceline.data.on_device.device_loader import DeviceEvalLoader, DeviceTrainLoader
from paceline.data.on_device.pixel_form import PixelForm, UnequalSizesError
from paceline.data.on_device.resident_loader import ResidentEvalLoader, ResidentTrainLoader
from paceline.data.on_device.resident_set import ResidentSet, mib, resident_set
from paceline.data.settings import DEVICE_DECODERS, DataSettings
from paceline.data.sources.source import Source
from paceline.data.sources.source_protocol import shard_sizes, with_remark


def create_train_loader(
    source: Source,
    plan: BatchPlan,
    settings: DataSettings,
    *,
    seed: int,
    rank: int,
    first_step: int,
    device: torch.device,
) -> TrainLoader | ResidentTrainLoader | DeviceTrainLoader | CopiedAhead:
    """DataError where decoding the set meets failing storage; ConfigError where `data.resident` = on, or
    `data.decoder`, cannot be done."""
    _get_ready(settings)
    chosen = _choose_for_training(source, settings, device)
    if isinstance(chosen, ResidentSet):
        return ResidentTrainLoader(
            chosen,
            plan,
            settings,
            seed=seed,
            rank=rank,
            first_step=first_step,
            groups=shard_sizes(source),
        )
    if settings.decoder in DEVICE_DECODERS:
        return DeviceTrainLoader(
            source,
            plan,
            settings,
            seed=seed,
            rank=rank,
            first_step=first_step,
            device=device,
            remark=with_remark(chosen, source),
        )
    loader = TrainLoader(
        source,
        plan,
        settings,
        seed=seed,
        rank=rank,
        first_step=first_step,
        pin_memory=device.type == "cuda",
        remark=with_remark(chosen, source),
    )
    return CopiedAhead(loader, device) if device.type == "cuda" else loader


def create_eval_loader(
    source: Source,
    settings: DataSettings,
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    device: torch.device,
) -> EvalLoader | ResidentEvalLoader | DeviceEvalLoader:
    """Fails as `create_train_loader` does."""
    _get_ready(settings)
    chosen = _choose(source, PixelForm.for_evaluation(settings), settings, device)
    if isinstance(chosen, ResidentSet):
        return ResidentEvalLoader(
            chosen, settings, rank=rank, world_size=world_size, batch_size=batch_size
        )
    if settings.decoder in DEVICE_DECODERS:
        return DeviceEvalLoader(
            source,
            settings,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            device=device,
            remark=with_remark(chosen, source),
        )
    return EvalLoader(
        source,
        settings,
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        pin_memory=device.type == "cuda",
        remark=with_remark(chosen, source),
    )


def _get_ready(settings: DataSettings) -> None:
    """A program may have a loader of ours, and no training."""
    if settings.decoder in DEVICE_DECODERS:
        ask_for_connections()


def _choose_for_training(
    source: Source, settings: DataSettings, device: torch.device
) -> ResidentSet | str:
    """Extras are done by Pillow, on the host: a resident set has no place for them."""
    if not extra_draws(settings):
        return _choose(source, PixelForm.for_training(settings), settings, device)
    if settings.resident == "on":
        raise ConfigError(
            "data.resident",
            "on",
            "data.color_jitter and data.randaugment are done on the host",
            "set data.resident = 'off', or leave these at 0",
        )
    asked = settings.resident == "auto" and device.type == "cuda"
    return "not resident: data.color_jitter and data.randaugment are the host's" if asked else ""


def _choose(
    source: Source, form: PixelForm, settings: DataSettings, device: torch.device
) -> ResidentSet | str:
    """The resident set, or why there is none; nothing to say where nobody would expect one."""
    wanted = settings.resident
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return ""
    if settings.decoder in DEVICE_DECODERS:
        if wanted == "auto":  # somebody chose the decoder, nobody residence
            return f"not resident: data.decoder = {settings.decoder}"
        raise ConfigError(
            "data.resident",
            wanted,
            f"is decoded once, by the host: data.decoder = {settings.decoder!r} would do nothing",
            "set data.resident = 'off', or data.decoder = 'auto'",
        )
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    shape = form.shape(source)
    if shape is None:
        return "not resident: no sample can be decoded"  # which the threads report as ever
    size = mib(len(source), shape)
    if wanted == "auto" and size > settings.resident_max_mib:
        return f"not resident: {size:,.0f} MiB, over data.resident_max_mib"
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
