"""Settings of the input pipeline: the section `[data]` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.exclusions import Exclusion, check_exclusions, not_in, one_of
from paceline.core.extensions import Registry
from paceline.core.settings import SettingChecks

_DIRECTORY = "data.sources.layouts:KIND"
# Names for `data.source`. Each refers to a `SourceKind`, or to a function given to `register_source`.
SOURCES: Registry[Any] = Registry(
    "sources",
    {
        "auto": _DIRECTORY,
        "embedded": "data.sources.shards:EMBEDDED_KIND",
        "shards": _DIRECTORY,
        "folder": _DIRECTORY,
        "cifar10": _DIRECTORY,
        "idx": _DIRECTORY,
        "synthetic": "data.sources.synthetic:KIND",
        "python": "data.sources.registry:PYTHON_OBJECT",
    },
)
AUGMENTATIONS = ("random_resized_crop", "pad_crop", "none")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
RESIDENCE = ("auto", "on", "off")
HOST_DECODERS = ("auto", "region", "pillow")
DEVICE_DECODERS = ("nvjpeg",)
DECODERS = (*HOST_DECODERS, *DEVICE_DECODERS)
# Maximum magnitude of RandAugment.
MOST_MAGNITUDE = 30
GLOBAL, SHARDS = "global", "shards"
# Number of shards that `data.shuffle = "shards"` mixes.
SHUFFLE_WINDOW = 16
CACHES = ("none", "memory", "disk")
CACHE_FORMS = ("raw", "decoded")
# ImageNet's mean and standard deviation by number of channels. For grayscale, the mean over RGB.
MEANS = {1: (0.449,), 3: (0.485, 0.456, 0.406)}
STDS = {1: (0.226,), 3: (0.229, 0.224, 0.225)}


def default_eval_resize(image_size: int) -> int:
    """Returns the default of `eval_resize`: `image_size` · 8 / 7, for example 256 for 224."""
    return round(image_size * 8 / 7)


@dataclass(frozen=True)
class DataSettings:
    """Settings of the data set, decoding, augmentation, order and caches."""

    dir: str = ""
    """Directory of the data set."""
    source: str = "auto"
    """Layout of `dir`: `shards`, `folder`, `cifar10` or `idx`; `auto` detects it; `embedded` and
    `synthetic` need no directory; `python` stands for a source or dataset that a program gave to
    `pl.Trainer`. `register_source` adds names."""
    image_size: int = 224
    """Edge of the images that the model sees, in pixels."""
    channels: int = 3
    """1 for grayscale, 3 for RGB."""
    augment: str = "random_resized_crop"
    """Crop of training images: `random_resized_crop`, `pad_crop` or `none`."""
    flip: bool = True
    """Flip half of the training images horizontally."""
    crop_padding: int = 4
    """Pixels of padding on each side, for `pad_crop`."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image's area, for `random_resized_crop`."""
    cutout: int = 0
    """Edge of a square that is blanked at a random place of each training image, in pixels; 0
    disables it."""
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Strengths of random brightness, contrast, saturation and hue; 0 disables each."""
    randaugment: tuple[int, int] = (0, 9)
    """RandAugment: operations per training image (0 disables it) and magnitude, 0 to 30."""
    eval_resize: int | None = None
    """Short side of validation images before the center crop, in pixels; 0 resizes them directly to
    `image_size`; unset, `image_size` · 8 / 7 (256 for 224)."""
    eval_flip: bool = False
    """Evaluate each validation image and its mirror image, and average the logits of both."""
    val_split: float = 0.0
    """Share of the training images of each class that is used for validation, if the data has no
    validation set; 0 takes none."""
    mean: tuple[float, ...] = ()
    """Mean for normalization on the scale 0 to 1; one value, or one for each channel; unset,
    ImageNet's."""
    std: tuple[float, ...] = ()
    """Standard deviation for normalization on the scale 0 to 1; one value, or one for each channel;
    unset, ImageNet's."""
    interpolation: str = "bilinear"
    """Resampling filter: `nearest`, `bilinear`, `bicubic` or `lanczos`."""
    decoder: str = "auto"
    """Decoder of JPEGs: `region` (C library, decodes only the crop), `pillow`, `nvjpeg` (on the
    GPU), or `auto` (`region` where available, else `pillow`)."""
    workers: int = 2
    """Threads that decode and augment, of each process; 0 does the work in the training thread."""
    resident: str = "auto"
    """Keep the decoded images of each split in the memory of the training device: `on`, `off`, or
    `auto` (on a GPU, for splits of at most 4,096 MiB); not possible for training with
    `random_resized_crop`."""
    max_corrupt_share: float = 0.01
    """End the run when more than this share of the samples is corrupt."""
    shuffle: str = "global"
    """Order of an epoch: `global` shuffles all samples, `shards` shuffles shards and runs of
    samples and reads mostly sequentially; `shards:64` mixes 64 shards with one another instead of
    16."""
    cache: str = "none"
    """Cache samples for later epochs: `none`, `memory` or `disk`."""
    cache_mib: int = 4096
    """Size limit of the cache of each split, in MiB."""
    cache_dir: str = ""
    """Directory of the disk cache."""
    cache_form: str = "raw"
    """What the cache keeps: `raw` files or `decoded` pixels."""
    synthetic_samples: int = 1280
    """Training images of `source = synthetic`; validation has a tenth as many."""
    synthetic_classes: int = 1000
    """Number of classes of `source = synthetic`."""

    @property
    def shuffle_window(self) -> int:
        """Number of shards that are mixed. 0 if `shuffle` is not `shards` or is invalid."""
        kind, _, window = self.shuffle.partition(":")
        if self.shuffle == SHARDS:
            return SHUFFLE_WINDOW
        return int(window) if kind == SHARDS and window.isdecimal() else 0

    def __post_init__(self) -> None:
        for name in ("crop_scale", "color_jitter", "randaugment", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._set_dependent_defaults()
        check = SettingChecks("data", self)
        check.known("source", SOURCES.names())
        check.known("augment", AUGMENTATIONS)
        check.known("interpolation", INTERPOLATIONS)
        check.known("resident", RESIDENCE)
        check.known("decoder", DECODERS)
        if self.shuffle != GLOBAL and self.shuffle_window < 1:
            raise check.error(
                "shuffle", "unknown", "use 'global', 'shards', or 'shards:64' for a window"
            )
        check.known("cache", CACHES)
        check.known("cache_form", CACHE_FORMS)
        for name in ("image_size", "synthetic_samples", "synthetic_classes", "cache_mib"):
            check.number(name, "at least 1", f"set data.{name} = 1")
        for name in ("crop_padding", "cutout", "eval_resize", "workers"):
            check.number(name, "0 or more", f"set data.{name} = 0")
        if self.channels not in (1, 3):
            raise check.error("channels", "must be 1 or 3", "1 is grayscale, 3 is RGB")
        check.number("val_split", "in [0, 1)", "0.1 takes one image in ten of each class")
        check.number(
            "max_corrupt_share", "in [0, 1)", "0.01 allows one corrupt sample in a hundred"
        )
        self._check_crops(check)
        self._check_extras(check)
        self._check_statistics(check)
        check_exclusions(EXCLUSIONS, data=self)

    def _set_dependent_defaults(self) -> None:
        """Sets defaults that depend on other settings, so that a run's record contains their values."""
        if self.eval_resize is None:
            object.__setattr__(self, "eval_resize", default_eval_resize(self.image_size))
        for name, values in (("mean", MEANS), ("std", STDS)):
            if not getattr(self, name):
                object.__setattr__(self, name, values.get(self.channels, values[3]))

    def _check_crops(self, check: SettingChecks) -> None:
        scale = self.crop_scale
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise check.error("crop_scale", "must be two numbers, 0 < low ≤ high ≤ 1")
        below = f"must be below data.image_size = {self.image_size}"
        if self.augment == "pad_crop" and self.crop_padding >= self.image_size:
            raise check.error("crop_padding", below, "an eighth of the image is usual")
        if self.cutout >= self.image_size:
            raise check.error("cutout", below, "a quarter to a half of the image is usual")
        # With 256 and a small image_size, the model would see only a few pixels in the center.
        if self.eval_resize and not self.image_size <= self.eval_resize <= 2 * self.image_size:
            raise check.error(
                "eval_resize", f"must be 0, or one to two times data.image_size = {self.image_size}",
                f"leave it out, or set data.eval_resize = {default_eval_resize(self.image_size)} or 0",
            )  # fmt: skip

    def _check_extras(self, check: SettingChecks) -> None:
        jitter, (count, magnitude) = self.color_jitter, self.randaugment
        if len(jitter) != 4 or min(jitter) < 0 or jitter[3] > 0.5:
            problem = "must be four numbers of 0 or more, the last (hue) at most 0.5"
            raise check.error("color_jitter", problem, "0.4, 0.4, 0.4, 0.1 is common")
        if count < 0 or not 0 <= magnitude <= MOST_MAGNITUDE:
            problem = f"must be operations (0: off) and a magnitude of 0 to {MOST_MAGNITUDE}"
            raise check.error("randaugment", problem, "2, 9 is common")

    def _check_statistics(self, check: SettingChecks) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            if len(value) not in {1, self.channels}:
                problem = f"has {len(value)} values for data.channels = {self.channels}"
                raise check.error(name, problem, "give one value, or one for each channel")
            if not all(0 <= number <= 1 for number in value):
                raise check.error(name, "must lie in 0 to 1", "divide 0-to-255 values by 255")
        if min(self.std) <= 0:
            raise check.error("std", "must be above 0", "0.25 is a common value")


_ON_DEVICE = {"data.decoder": one_of(*DEVICE_DECODERS)}
EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "data.cache_dir", one_of(""), {"data.cache": one_of("disk")},
        "data.cache = 'disk' needs a directory", "name one on a local disk",
    ),
    Exclusion(
        "data.cache_form", one_of("decoded"), {"data.cache": not_in("none"), **_ON_DEVICE},
        "data.decoder = {data.decoder!r} takes encoded images, not pixels",
        "set data.cache_form = 'raw'",
    ),
    Exclusion(
        "data.dir", not_in(""), {"data.source": one_of("embedded", "synthetic")},
        "is not read by data.source = {data.source!r}",
        "set data.source = 'auto', or leave data.dir empty",
    ),
    Exclusion(
        "data.dir", one_of(""),
        {"data.source": one_of("shards", "folder", "cifar10", "idx")},
        "data.source = {data.source!r} needs a directory",
        "give --data-dir, or set data.source = 'embedded'",
    ),
    *(
        Exclusion(
            f"data.{name}", not_in(known), _ON_DEVICE,
            f"data.decoder = {{data.decoder!r}} has only {known!r}", "set data.decoder = 'auto'",
        )
        for name, known in (
            ("channels", 3), ("interpolation", "bilinear"), ("augment", "random_resized_crop"),
        )
    ),
    *(
        Exclusion(
            "data.decoder", one_of(*DEVICE_DECODERS), {f"data.{name}": draws},
            "cannot do data.color_jitter or data.randaugment",
            "set data.decoder = 'auto', or leave these at 0",
        )
        for name, draws in (("color_jitter", any), ("randaugment", lambda value: value[0] > 0))
    ),
)  # fmt: skip
