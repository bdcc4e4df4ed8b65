"""`PackOptions`: what `paceline pack` makes of the images it is given.

In: the options of the command. Out: checked values; two packs with equal options of equal data are
equal byte for byte.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from paceline.core.errors import ConfigError, nearest

FORMATS = ("keep", "jpeg", "png", "webp")
FILTERS = ("bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class PackOptions:
    """`short_side` 0 keeps every size. `shard_samples` 0 leaves the cut to `shard_mib` alone.

    `format` keep writes each image in its own format, pixels of an array as PNG. `quality` is that of
    images that are encoded anew. Images are shuffled once by `seed`, so that every shard holds a mixture
    of all classes. `max_corrupt_share` of a split may be left out as corrupt.
    """

    short_side: int = 0
    quality: int = 90
    format: str = "keep"
    # Nearest to what the model sees without packing, and smallest: DESIGN.md has the figures.
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
        """What the manifest keeps. The limit on corrupt images decides about no byte."""
        return {name: v for name, v in asdict(self).items() if name != "max_corrupt_share"}
