"""`PackOptions`, the options of `paceline pack`; `PackManifest`, the record of the written shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import features

from paceline.core.errors import ConfigError, DataError, nearest
from paceline.core.files import read_regular
from paceline.core.settings import from_table
from paceline.core.untrusted import parse_json, short_repr
from paceline.data.image import CorruptSample
from paceline.data.sources.storage import write_file

MANIFEST_FILE = "pack.json"
_VERSION = 1
_LONGEST_NAME = 255
FORMATS = ("keep", "jpeg", "png", "webp")
FILTERS = ("bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class PackOptions:
    """The options of `paceline pack`. Equal options and data give equal bytes.

    Attributes:
        short_side: Larger images are scaled to this short side in pixels. 0 keeps all sizes.
        quality: JPEG or WebP quality of images that are encoded again.
        format: "jpeg", "png", "webp", or "keep" for each image's own format (PNG for pixels).
        filter: Name of the resampling filter.
        shard_mib: A shard ends when it reaches this size in MiB.
        shard_samples: A shard ends after this many samples. 0 sets no limit.
        shuffle: Shuffles the samples once, so that every shard has a mixture of classes.
        seed: Seed of the shuffle.
        max_corrupt_share: Maximum fraction of the samples of a split to leave out as corrupt.
    """

    short_side: int = 0
    quality: int = 90
    format: str = "keep"
    filter: str = "bilinear"
    shard_mib: int = 128
    shard_samples: int = 0
    shuffle: bool = True
    seed: int = 0
    max_corrupt_share: float = 0.01

    def __post_init__(self) -> None:
        for name, known in (("format", FORMATS), ("filter", FILTERS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"--{name}", value, "unknown", nearest(value, known))
        for name, least, most in (
            ("short_side", 0, 16_384),
            ("quality", 1, 100),
            ("shard_mib", 1, 65_536),
            ("shard_samples", 0, 10_000_000),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(flag, value, f"must be {least} to {most}", "choose another")
        if not 0 <= self.max_corrupt_share < 1:
            raise ConfigError(
                "--max-corrupt-share", self.max_corrupt_share, "must be in [0, 1)", "try 0.01"
            )

    def table(self) -> dict[str, object]:
        """Returns the options that determine the bytes of the shards as a dict, for the manifest."""
        return {name: v for name, v in asdict(self).items() if name != "max_corrupt_share"}


@dataclass(frozen=True)
class PackedShard:
    """A complete shard in a manifest.

    `stop` is the position after its last sample, in the order in which samples are written.
    """

    name: str
    samples: int
    bytes: int
    sha256: str
    stop: int


@dataclass
class PackedSplit:
    """The shards of a split in a manifest.

    `source` identifies the packed data set. `stop` is the number of processed samples, including
    corrupt ones.
    """

    source: str
    samples: int
    shards: list[PackedShard] = field(default_factory=list)
    corrupt: list[CorruptSample] = field(default_factory=list)
    copied: int = 0
    complete: bool = False

    @property
    def stop(self) -> int:
        return self.shards[-1].stop if self.shards else 0

    @property
    def packed(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def check_shards(self, directory: Path) -> None:
        """Raises DataError if a shard is missing or its size differs from the manifest."""
        for shard in self.shards:
            path = directory / shard.name
            try:
                size = path.stat().st_size if path.is_file() else None
            except OSError as error:
                raise DataError(
                    f"{path}: is not accessible ({error.strerror})", "check that it is mounted"
                ) from None
            if size != shard.bytes:
                problem = "is missing" if size is None else f"has {size} bytes, not {shard.bytes}"
                raise DataError(
                    f"{path}: {problem} (see {MANIFEST_FILE})", "copy it again, or pack again"
                )


class PackManifest:
    """Contents of `pack.json`: the options of `paceline pack`, and the shards that are complete.

    The file is replaced atomically after each shard. The manifest lets `paceline pack`
    continue after an interruption, and prevents that other data or options are used for the rest.
    """

    def __init__(self, directory: Path, options: Mapping[str, object]) -> None:
        self._path = directory / MANIFEST_FILE
        self.options = dict(options)
        self.encoders = encoder_versions()
        self.splits: dict[str, PackedSplit] = {}

    @classmethod
    def read(cls, directory: Path) -> PackManifest | None:
        """Reads the manifest of a directory. Returns None if there is no manifest.

        Raises:
            DataError: If the manifest is damaged.
        """
        path = directory / MANIFEST_FILE
        try:
            content = parse_json(read_regular(path))
            if content["version"] != _VERSION:
                raise DataError(
                    f"{path}: version {content['version']!r}, but this Paceline reads only {_VERSION}",
                    "pack into another directory",
                )
            manifest = cls(directory, dict(content["options"]))
            manifest.encoders = dict(content["encoders"])
            manifest.splits = {name: _split(t) for name, t in content["splits"].items()}
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})", "check it") from None
        except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{path}: is not a manifest of paceline pack ({type(error).__name__}: {error})",
                "restore it, or pack into an empty directory",
            ) from None
        return manifest

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raises DataError for the first option or library version that differs from the manifest."""
        packed = self.options | {f"version of {k}": v for k, v in self.encoders.items()}
        wanted = dict(options) | {f"version of {k}": v for k, v in encoder_versions().items()}
        for name in sorted(packed.keys() | wanted.keys()):
            if packed.get(name) != wanted.get(name):
                raise DataError(
                    f"{self._path.parent}: was packed with {name} = {packed.get(name)!r}, "
                    f"not {wanted.get(name)!r}",
                    "repeat the first command to continue, or pack into another directory",
                )

    def save(self) -> None:
        content = {
            "version": _VERSION,
            "options": self.options,
            "encoders": self.encoders,
            "splits": {name: asdict(split) for name, split in self.splits.items()},
        }
        write_file(self._path, json.dumps(content, indent=1).encode() + b"\n")


def check_packed(directory: Path, split: str) -> None:
    """Raises DataError if the directory has a pack whose `split` is incomplete."""
    manifest = PackManifest.read(directory)
    record = manifest.splits.get(split) if manifest is not None else None
    if record is None:
        return
    if not record.complete:
        raise DataError(
            f"{directory}: {split} is packed up to {record.stop} of {record.samples} samples",
            "repeat the pack command, which continues there",
        )
    record.check_shards(directory)


def encoder_versions() -> dict[str, str]:
    """Returns the versions of the libraries that determine the bytes of encoded images."""
    versions = {name: features.version(name) for name in ("pil", "jpg", "zlib", "webp")}
    return {name: str(version) for name, version in versions.items()}


def _split(table: dict[str, Any]) -> PackedSplit:
    if not table.keys() >= {"shards", "corrupt"}:
        raise ValueError("a split needs the keys shards and corrupt")
    split = from_table(PackedSplit, "splits", table)
    for shard in split.shards:
        # The name becomes a path, which must be valid and inside the directory.
        plain = os.path.basename(shard.name) == shard.name and "\0" not in shard.name  # noqa: PTH119
        if not plain or shard.name in ("", ".", "..") or len(shard.name.encode()) > _LONGEST_NAME:
            raise ValueError(f"invalid file name of a shard: {short_repr(shard.name)}")
    counts = [n for shard in split.shards for n in (shard.samples, shard.bytes, shard.stop)]
    if min(split.samples, split.copied, *counts) < 0:
        raise ValueError("counts must be whole numbers, 0 or more")
    return split
