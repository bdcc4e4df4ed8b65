"""`paceline pack SRC DST`: any data set as tar shards, scaled and encoded once, not in every epoch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.core.errors import ConfigError
from paceline.core.untrusted import one_line

if TYPE_CHECKING:
    from paceline.data.packing.pack_manifest import PackedSplit

_NAMED = 10


def pack_data(
    paths: list[str] = typer.Argument(
        help="Data that --data-dir would take, and a directory that is new, empty, or a pack to go "
        "on with. The embedded set (--source embedded) needs no SRC.",
        metavar="[SRC] DST",
    ),
    source: str = typer.Option("auto", help="Kind of SRC, as data.source."),
    split: str = typer.Option("all", help="all, train or val."),
    short_side: int = typer.Option(0, help="Scale larger images to this short side; 0 keeps all."),
    quality: int = typer.Option(90, help="Of JPEG and WebP images that are encoded anew."),
    image_format: str = typer.Option("keep", "--format", help="keep, jpeg, png or webp."),
    image_filter: str = typer.Option("bilinear", "--filter", help="bilinear, bicubic or lanczos."),
    shard_mib: int = typer.Option(128, help="A shard ends once it is this large."),
    shard_samples: int = typer.Option(0, help="A shard ends after this many samples; 0: no limit."),
    shuffle: bool = typer.Option(True, help="Shuffle once, so that shards are class-mixed."),
    seed: int = typer.Option(0, min=0, help="Of the shuffle."),
    workers: int | None = typer.Option(None, min=0, help="Threads. Default: a core each."),
    max_corrupt_share: float = typer.Option(0.01, help="Share of a split that may be left out."),
) -> int:
    """Pack a data set into tar shards."""
    from paceline.cli.progress_bars import ProgressBars
    from paceline.core.cores import available_cores
    from paceline.data.packing.pack import pack
    from paceline.data.packing.pack_options import PackOptions
    from paceline.data.packing.pack_source import open_splits

    options = PackOptions(
        short_side=short_side,
        quality=quality,
        format=image_format,
        filter=image_filter,
        shard_mib=shard_mib,
        shard_samples=shard_samples,
        shuffle=shuffle,
        seed=seed,
        max_corrupt_share=max_corrupt_share,
    )
    began = time.monotonic()
    data_dir, target = _source_and_target(paths, source)
    sources = open_splits(data_dir, source, split, _echo)

    def on_sample(name: str, done: int, corrupt: int) -> None:
        bars.update(name, done, len(sources[name]), f"{corrupt} corrupt" if corrupt else "")

    try:
        with ProgressBars() as bars:
            manifest = pack(
                sources,
                target,
                options,
                workers=available_cores() if workers is None else workers,
                on_sample=on_sample,
                tell=_echo,
            )
    except KeyboardInterrupt:
        typer.echo("interrupted: finished shards are kept; the same command goes on", err=True)
        return 130
    finally:
        for found in sources.values():
            found.close()
    for name in sources:
        typer.echo(_told(name, manifest.splits[name]))
    typer.echo(f"packed into {target} in {time.monotonic() - began:.1f} s")
    return 0


def _echo(text: str) -> None:
    """Notes on data name its files and classes."""
    typer.echo(one_line(text))


def _source_and_target(paths: list[str], source: str) -> tuple[str, Path]:
    made_up = source in ("embedded", "synthetic")
    if len(paths) != (1 if made_up else 2):
        wanted = "DST alone" if made_up else "SRC and DST"
        raise ConfigError(
            "SRC DST",
            " ".join(paths),
            f"--source {source} takes {wanted}",
            "see paceline pack --help",
        )
    data_dir, target = "" if made_up else paths[0], Path(paths[-1]).expanduser()
    if data_dir and target.resolve() == Path(data_dir).expanduser().resolve():
        raise ConfigError("DST", str(target), "is the source itself", "choose a new directory")
    return data_dir, target


def _told(name: str, split: PackedSplit) -> str:
    """What became of a split; names the first corrupt images."""
    size = sum(shard.bytes for shard in split.shards)
    lines = [
        f"{name}: {split.packed} images in {len(split.shards)} shards, {size / 2**20:,.1f} MiB; "
        f"{split.copied} copied as they were, {split.packed - split.copied} encoded anew"
    ]
    lines += [one_line(f"corrupt, left out: {s.name} ({s.reason})") for s in split.corrupt[:_NAMED]]
    if len(split.corrupt) > _NAMED:
        lines.append(f"corrupt, left out: {len(split.corrupt) - _NAMED} more, see pack.json")
    return "\n".join(lines)
