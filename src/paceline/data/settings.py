"""Settings of the input pipeline: the section `[data]` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError, nearest

SOURCES = ("auto", "embedded", "shards", "folder", "imagenet", "cifar10", "idx", "synthetic")
AUGMENTATIONS = ("random_resized_crop", "pad_crop", "none")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
RESIDENCE = ("auto", "on", "off")
HOST_DECODERS = ("auto", "region", "pillow")
DEVICE_DECODERS = ("nvjpeg",)
DECODERS = (*HOST_DECODERS, *DEVICE_DECODERS)
# The strongest of RandAugment's operations.
MOST_MAGNITUDE = 30
SHUFFLES = ("global", "shards")
CACHES = ("none", "memory", "disk")
CACHE_FORMS = ("raw", "decoded")


@dataclass(frozen=True)
class DataSettings:
    """Where the images come from, and what becomes of them before the model sees them.

    `source` is embedded, shards, folder, imagenet (the published archives), cifar10, idx,
    synthetic, or auto, which finds out what `dir` holds. `augment` is random_resized_crop, pad_crop
    or none; `interpolation` is nearest, bilinear, bicubic or lanczos. `cutout` blanks a square of
    that many pixels a side at a random place of each training image, 0 none (DeVries and Taylor
    2017). `color_jitter` are the strengths with which brightness, contrast, saturation and hue
    vary; `randaugment` is how many of its operations each training image gets, and their magnitude
    of 30; both on the host. `mean` and `std` are on the scale 0 to 1, one value for all channels or
    one for each. `eval_resize` is the short side before the centre crop of validation images; 0
    scales them straight to `image_size`. `decoder` is region (JPEGs: only what the crop needs, by a
    C library), pillow (all of the image), or auto: region where that can be had; the pixels are the
    same; or, on a GPU, nvjpeg: many at a time there, with the same crops, of pixels that differ by
    a few levels. `workers` are threads; 0 does the work in the caller. `resident` on decodes each
    split once, onto the training device, and augments there; auto does so on a GPU for a split of
    at most `resident_max_mib`. `shuffle` global draws each epoch's order from all samples; shards
    shuffles the shards and then runs of `shuffle_run` neighbouring samples among
    `shuffle_window_shards` shards, and so reads mostly sequentially. `read_retries` is how often a
    read that fails for the moment is tried again. `cache` memory or disk keeps at most `cache_mib`
    MiB of each split for later epochs, disk in `cache_dir`; `cache_form` raw keeps files, decoded
    keeps pixels.
    """

    dir: str = ""
    source: str = "auto"
    image_size: int = 224
    channels: int = 3
    augment: str = "random_resized_crop"
    flip: bool = True
    crop_padding: int = 4
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    cutout: int = 0
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    randaugment: tuple[int, int] = (0, 9)
    eval_resize: int = 256
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    decoder: str = "auto"
    workers: int = 2
    prefetch_batches: int = 4
    resident: str = "auto"
    resident_max_mib: int = 4096
    max_corrupt_share: float = 0.01
    shuffle: str = "global"
    shuffle_window_shards: int = 16
    shuffle_run: int = 16
    read_retries: int = 6
    cache: str = "none"
    cache_mib: int = 4096
    cache_dir: str = ""
    cache_form: str = "raw"
    synthetic_samples: int = 1280
    synthetic_classes: int = 1000

    def __post_init__(self) -> None:
        for name in ("crop_scale", "crop_ratio", "color_jitter", "randaugment", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_choice("source", SOURCES)
        self._check_choice("augment", AUGMENTATIONS)
        self._check_choice("interpolation", INTERPOLATIONS)
        self._check_choice("resident", RESIDENCE)
        if self.decoder == "dali":
            raise _error("decoder", self.decoder, "was removed", "set data.decoder = 'nvjpeg'")
        self._check_choice("decoder", DECODERS)
        self._check_choice("shuffle", SHUFFLES)
        self._check_choice("cache", CACHES)
        self._check_choice("cache_form", CACHE_FORMS)
        for name in ("image_size", "prefetch_batches", "synthetic_samples", "synthetic_classes"):
            self._check_at_least(name, 1)
        for name in ("crop_padding", "cutout", "eval_resize", "workers", "resident_max_mib"):
            self._check_at_least(name, 0)
        for name in ("shuffle_window_shards", "shuffle_run", "cache_mib"):
            self._check_at_least(name, 1)
        self._check_at_least("read_retries", 0)
        if self.cache == "disk" and not self.cache_dir:
            raise _error("cache_dir", self.cache_dir, "data.cache = 'disk' needs a directory",
                         "name one on a local disk")  # fmt: skip
        if (
            self.cache != "none"
            and self.cache_form == "decoded"
            and self.decoder in DEVICE_DECODERS
        ):
            raise _error("cache_form", self.cache_form,
                         f"data.decoder = {self.decoder!r} takes encoded images, not pixels",
                         "set data.cache_form = 'raw'")  # fmt: skip
        if self.channels not in (1, 3):
            raise _error("channels", self.channels, "must be 1 or 3", "1 is greyscale, 3 is RGB")
        if not 0 <= self.max_corrupt_share < 1:
            raise _error(
                "max_corrupt_share",
                self.max_corrupt_share,
                "must be in [0, 1)",
                "0.01 lets one sample in a hundred be corrupt, 0 none",
            )
        self._check_dir()
        self._check_crops()
        self._check_extras()
        self._check_statistics()

    def _check_choice(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise _error(name, value, "unknown", nearest(str(value), known))

    def _check_at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value < least:
            raise _error(name, value, f"must be at least {least}", f"set data.{name} = {least}")

    def _check_dir(self) -> None:
        """A directory that would not be read, or is missing where it must be, is a mistake."""
        if self.source in ("embedded", "synthetic") and self.dir:
            raise _error(
                "dir",
                self.dir,
                f"is not read by data.source = {self.source!r}",
                "set data.source = 'auto', or leave data.dir empty",
            )
        if self.source in ("shards", "folder", "imagenet", "cifar10", "idx") and not self.dir:
            raise _error(
                "dir",
                self.dir,
                f"data.source = {self.source!r} needs a directory",
                "give --data-dir, or set data.source = 'embedded'",
            )

    def _check_crops(self) -> None:
        for name, most in (("crop_scale", 1.0), ("crop_ratio", math.inf)):
            value = getattr(self, name)
            if len(value) != 2 or not 0 < value[0] <= value[1] <= most or math.isinf(value[1]):
                limit = " ≤ 1" if most == 1 else ""
                raise _error(name, value, f"must be two numbers, 0 < low ≤ high{limit}")
        if self.augment == "pad_crop" and self.crop_padding >= self.image_size:
            raise _error(
                "crop_padding",
                self.crop_padding,
                f"must be below data.image_size = {self.image_size}",
                "an eighth of the image is usual",
            )
        if self.cutout >= self.image_size:
            raise _error(
                "cutout",
                self.cutout,
                f"must be below data.image_size = {self.image_size}",
                "a quarter to a half of the image is usual",
            )
        # 256 is right for 224; left as it is beside a small image_size, the centre crop would show
        # the model a few pixels of the middle, and the accuracy would silently be nothing.
        if self.eval_resize and not self.image_size <= self.eval_resize <= 2 * self.image_size:
            raise _error(
                "eval_resize",
                self.eval_resize,
                f"must be 0, or one to two times data.image_size = {self.image_size}",
                f"set data.eval_resize = {round(self.image_size * 8 / 7)}, or 0",
            )

    def _check_extras(self) -> None:
        jitter, (count, magnitude) = self.color_jitter, self.randaugment
        if len(jitter) != 4 or min(jitter) < 0 or jitter[3] > 0.5:
            raise _error(
                "color_jitter",
                jitter,
                "must be four numbers of 0 or more, the last (hue) at most 0.5",
                "0.4, 0.4, 0.4, 0.1 is common",
            )
        if count < 0 or not 0 <= magnitude <= MOST_MAGNITUDE:
            raise _error(
                "randaugment",
                self.randaugment,
                f"must be operations (0: off) and a magnitude of 0 to {MOST_MAGNITUDE}",
                "2, 9 is common",
            )

    def _check_statistics(self) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            if len(value) not in {1, self.channels}:
                raise _error(
                    name,
                    value,
                    f"has {len(value)} values for data.channels = {self.channels}",
                    "give one value, or one for each channel",
                )
            if not all(0 <= number <= 1 for number in value):
                raise _error(name, value, "must lie in 0 to 1", "divide 0-to-255 values by 255")
        if min(self.std) <= 0:
            raise _error("std", self.std, "must be above 0", "0.25 is a common value")


def _error(name: str, value: Any, problem: str, remedy: str = "") -> ConfigError:
    return ConfigError(f"data.{name}", value, problem, remedy)
