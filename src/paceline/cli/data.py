"""`paceline pack` writes tar shards of a data set; `paceline inspect` checks a data set."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.options import AsJson, Workers
from paceline.core.errors import ConfigError
from paceline.core.host import available_cores
from paceline.core.units import format_bytes, format_duration
from paceline.core.untrusted import one_line
from paceline.train.display import ProgressBars

if TYPE_CHECKING:
    from paceline.data import PackedSplit

# Further corrupt images are counted, not named.
_MAX_NAMED = 10


def pack_data(
    paths: list[str] = typer.Argument(
        help="Data that --data-dir takes, and a directory that is new, empty, or an unfinished pack. "
        "The embedded set (--source embedded) needs no SRC.",
        metavar="[SRC] DST",
    ),
    source: str = typer.Option("auto", help="Kind of SRC, as data.source."),
    split: str = typer.Option("all", help="all, train or val."),
    short_side: int = typer.Option(0, help="Scale larger images to this short side; 0 keeps all."),
    quality: int = typer.Option(90, help="Of JPEG and WebP images that are re-encoded."),
    image_format: str = typer.Option("keep", "--format", help="keep, jpeg, png or webp."),
    image_filter: str = typer.Option("bilinear", "--filter", help="bilinear, bicubic or lanczos."),
    shard_mib: int = typer.Option(128, help="A shard ends once it is this large."),
    shard_samples: int = typer.Option(0, help="A shard ends after this many samples; 0: no limit."),
    shuffle: bool = typer.Option(True, help="Shuffle once, so that shards are class-mixed."),
    seed: int = typer.Option(0, min=0, help="Of the shuffle."),
    workers: Workers = None,
    max_corrupt_share: float = typer.Option(0.01, help="Share of a split that may be left out."),
) -> int:
    """Pack a data set into tar shards."""
    from paceline.data import PackOptions, open_splits, pack_splits

    options = PackOptions(
        short_side=short_side, quality=quality, format=image_format, filter=image_filter,
        shard_mib=shard_mib, shard_samples=shard_samples, shuffle=shuffle, seed=seed,
        max_corrupt_share=max_corrupt_share,
    )  # fmt: skip
    began = time.monotonic()
    data_dir, target = _source_and_target(paths, source)
    sources = open_splits(data_dir, source, split, _echo)

    def on_sample(name: str, done: int, corrupt: int) -> None:
        bars.update(name, done, len(sources[name]), f"{corrupt} corrupt" if corrupt else "")

    try:
        with ProgressBars() as bars:
            manifest = pack_splits(
                sources, target, options, workers=_thread_count(workers), on_sample=on_sample,
                on_note=_echo,
            )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo("interrupted: finished shards are kept; the same command continues", err=True)
        return 130
    finally:
        for opened in sources.values():
            opened.close()
    for name in sources:
        typer.echo(_describe_split(name, manifest.splits[name]))
    typer.echo(f"packed into {target} in {format_duration(time.monotonic() - began)}")
    return 0


def _echo(text: str) -> None:
    """Prints a line with names of files and classes, which may contain escape sequences."""
    typer.echo(one_line(text))


def _thread_count(workers: int | None) -> int:
    return available_cores() if workers is None else workers


def _source_and_target(paths: list[str], source: str) -> tuple[str, Path]:
    built_in = source in ("embedded", "synthetic")
    if len(paths) != (1 if built_in else 2):
        wanted = "DST alone" if built_in else "SRC and DST"
        problem = f"--source {source} takes {wanted}"
        raise ConfigError("SRC DST", " ".join(paths), problem, "see paceline pack --help")
    data_dir, target = "" if built_in else paths[0], Path(paths[-1]).expanduser()
    if data_dir and target.resolve() == Path(data_dir).expanduser().resolve():
        raise ConfigError("DST", str(target), "is the source itself", "choose a new directory")
    return data_dir, target


def _describe_split(name: str, split: PackedSplit) -> str:
    size = sum(shard.bytes for shard in split.shards)
    lines = [
        f"{name}: {split.packed} images in {len(split.shards)} shards, {format_bytes(size)}; "
        f"{split.copied} copied, {split.packed - split.copied} re-encoded"
    ]
    lines += [
        one_line(f"corrupt, left out: {s.name} ({s.reason})") for s in split.corrupt[:_MAX_NAMED]
    ]
    if len(split.corrupt) > _MAX_NAMED:
        lines.append(f"corrupt, left out: {len(split.corrupt) - _MAX_NAMED} more, see pack.json")
    return "\n".join(lines)


def inspect_data(
    directory: str = typer.Argument("", help="A directory that --data-dir of train takes."),
    data_dir: str = typer.Option("", help="The same as DIRECTORY."),
    source: str = typer.Option("auto", help="Kind of data, as data.source."),
    split: str = typer.Option("all", help="all, train or val."),
    sample: int = typer.Option(256, min=0, help="Images of each split to decode."),
    everything: bool = typer.Option(False, "--all", help="Decode every image."),
    checksums: bool = typer.Option(True, help="Compare the shards' SHA-256 with the manifest."),
    as_json: AsJson = False,
    workers: Workers = None,
) -> int:
    """Count and check a data set; the exit code is 1 if it has a problem."""
    from paceline.data import inspect_set

    if directory and data_dir:
        raise ConfigError("--data-dir", data_dir, "is given twice", f"leave out {directory}")
    with ProgressBars() as bars:
        report = inspect_set(
            directory or data_dir, source, split, look_at=None if everything else sample,
            checksums=checksums, workers=_thread_count(workers), on_progress=bars.update,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(report.table()))
        return 1 if report.problems else 0
    for name, facts in report.splits.items():
        _print_table(name, facts.table())
    for note in report.notes:
        _echo(f"note: {note}")
    for problem in report.problems:
        _echo(f"problem: {problem}")
    if not report.problems:
        typer.echo("no problem found")
    return 1 if report.problems else 0


def _print_table(name: str, facts: dict[str, object]) -> None:
    table = Table(title=name, show_header=False, title_justify="left")
    for label, value in facts.items():
        if label != "corrupt":
            # The name of a class may contain markup and escape sequences.
            table.add_row(label.replace("_", " "), Text(one_line(_text(value))))
    Console().print(table)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
