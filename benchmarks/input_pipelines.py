"""Images/s of input pipelines: ours, torch's DataLoader with Pillow, and webdataset.

    python -m benchmarks.input_pipelines --data-dir shards --workers 1,2 --peers dataloader

Our rows are those of `paceline bench input`. In processes, torch's DataLoader workers each run our loader
without threads, and batches come back through shared memory. Workers of peers are processes that live
through the whole measurement, with one torch thread each; they decode, augment, normalize and collate.
Epochs never end, so that no peer pays for starting one. `--synthetic-index N` measures memory and seek on
N samples instead.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import torch
import typer
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from benchmarks.program import run
from paceline.bench.input_rows import (
    InputRow,
    InputStream,
    OnProgress,
    OpenStream,
    RowRates,
    create_loader,
    endless,
    measure_rows,
    normalized,
    one_torch_thread,
    open_repeated,
    open_threads,
)
from paceline.cli import options
from paceline.cli.bench import (
    input_rows,
    parse_counts,
    parse_data_settings,
    print_input_rows,
    report_progress,
)
from paceline.cli.measure import chosen_device, environment, print_json
from paceline.cli.options import check_at_least
from paceline.core.errors import ConfigError, DataError
from paceline.core.units import format_duration
from paceline.data import (
    Batch,
    BatchPlan,
    DataSettings,
    Int64,
    Source,
    TrainBatches,
    create_train_loader,
    numbered_classes,
    open_source,
)
from paceline.data.augment import CROP_RATIO, draws, random_box

# Classes of the stubbed index, and how often memory is read in an epoch.
_CLASSES = 1000
_MARKS = 20


class OurBatches(IterableDataset[Batch]):
    """Each worker makes its share of the batches, like a rank."""

    def __init__(self, row: InputRow) -> None:
        self._row = row

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        assert worker is not None
        row = self._threadless()
        source = open_repeated(row.settings, row.split)  # open until the worker ends
        return endless(create_loader(row, source, rank=worker.id, world_size=worker.num_workers))

    def _threadless(self) -> InputRow:
        settings = replace(self._row.settings, workers=0)
        return replace(self._row, settings=settings, device="cpu")

    def describe(self) -> str:
        """Describes a worker's loader, by creating one here."""
        row = self._threadless()
        source = open_repeated(row.settings, row.split)
        try:
            with create_loader(row, source) as loader:
                return f"processes, each {loader.describe()}"
        finally:
            source.close()


@contextmanager
def open_processes(row: InputRow) -> Iterator[InputStream]:
    ours = OurBatches(row)
    described = ours.describe()
    loader = DataLoader(
        ours, batch_size=None, num_workers=row.workers, multiprocessing_context="fork",
        pin_memory=row.device == "cuda",
    )  # fmt: skip
    yield InputStream(normalized(iter(loader), row), 2 * row.workers, described)


_PREFETCH = 2
_SHUFFLE_BUFFER = 1000
# From encoded bytes to a normalized float tensor, channels × height × width.
PeerTransform = Callable[[bytes], torch.Tensor]
Finish = Callable[[Image.Image], torch.Tensor]


def delivered(batches: Iterator[Any], row: InputRow, library: str) -> InputStream:
    """Batches of the loader of `library`, moved to the device in the format of models."""

    def moved(batch: Any) -> torch.Tensor:
        images: torch.Tensor = batch[0]
        if row.device == "cpu":
            return images
        images = images.to(row.device, non_blocking=True)
        return images.to(row.dtype, memory_format=torch.channels_last)

    described = f"{library}, Pillow {PIL.__version__}, in processes"
    return InputStream(map(moved, batches), _PREFETCH * row.workers, described)


class PillowImages(Dataset[tuple[torch.Tensor, int]]):
    """Like torchvision's ImageFolder, but reads from our source without opening files."""

    def __init__(self, source: Source, row: InputRow) -> None:
        self._source = source
        self._transform = peer_transform(row.settings, row.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data = self._source.read(index)
        assert isinstance(data, bytes)
        return self._transform(data), int(self._source.labels[index])


class EndlessOrder(Sampler[int]):
    """Endless epochs, shuffled for training."""

    def __init__(self, count: int, shuffle: bool, seed: int) -> None:
        self._count, self._shuffle = count, shuffle
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._count))
        while True:
            if self._shuffle:
                self._random.shuffle(order)
            yield from order


@contextmanager
def open_dataloader(row: InputRow) -> Iterator[InputStream]:
    source = open_source(row.settings, row.split)
    try:
        if not isinstance(source.read(0), bytes):
            raise DataError(
                f"{row.settings.dir}: holds pixels, not encoded images",
                "measure JPEGs: tar shards or class folders",
            )
        loader = DataLoader(
            PillowImages(source, row), batch_size=row.batch_size,
            sampler=EndlessOrder(len(source), row.split == "train", row.seed),
            num_workers=row.workers, prefetch_factor=_PREFETCH, persistent_workers=True,
            pin_memory=row.device == "cuda", multiprocessing_context="fork",
        )  # fmt: skip
        yield delivered(iter(loader), row, f"DataLoader of torch {torch.__version__}")
    finally:
        source.close()


def no_webdataset(directory: str, split: str) -> str | None:
    """Returns the reason why webdataset cannot be measured; None if it can."""
    if importlib.util.find_spec("webdataset") is None:
        return "the library is not installed (pip install webdataset)"
    if not list(Path(directory).glob(f"{split}-*.tar")):
        return f"no {split}-*.tar in {directory}"
    return None


@contextmanager
def open_webdataset(row: InputRow) -> Iterator[InputStream]:
    """Shards are drawn with replacement, so that there may be more workers than shards."""
    import webdataset

    shards = sorted(str(path) for path in Path(row.settings.dir).glob(f"{row.split}-*.tar"))
    images = webdataset.WebDataset(shards, resampled=True, shardshuffle=False)
    if row.split == "train":
        images = images.shuffle(_SHUFFLE_BUFFER)
    images = (
        images.to_tuple("jpg;jpeg;png;webp", "cls")
        .map_tuple(peer_transform(row.settings, row.split), int)
        .batched(row.batch_size, collation_fn=default_collate, partial=False)
    )
    loader = webdataset.WebLoader(
        images, batch_size=None, num_workers=row.workers, prefetch_factor=_PREFETCH,
        persistent_workers=True, pin_memory=row.device == "cuda", multiprocessing_context="fork",
    )  # fmt: skip
    version = importlib.metadata.version("webdataset")
    yield delivered(iter(loader), row, f"webdataset {version}")


def train_peer(settings: DataSettings, finish: Finish, data: bytes) -> torch.Tensor:
    """Decode, random resized crop, flip and normalize: the steps of torchvision's transforms at least
    cost."""
    image = _opened(data)
    row = [random.random() for _ in range(draws(settings))]
    box = random_box(image.width, image.height, row, settings.crop_scale, CROP_RATIO)
    side = settings.image_size
    image = image.crop(box).resize((side, side), Image.Resampling.BILINEAR)
    if settings.flip and random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return finish(image)


def eval_peer(settings: DataSettings, finish: Finish, data: bytes) -> torch.Tensor:
    """Decode, resize the short side to `eval_resize`, center crop and normalize."""
    size = settings.image_size
    short = settings.eval_resize or size
    image = _opened(data)
    shorter = min(image.size)
    scaled = (short * image.width // shorter, short * image.height // shorter)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in image.size)
    return finish(image.crop((left, top, left + size, top + size)))


def peer_transform(settings: DataSettings, split: str) -> PeerTransform:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (settings.mean, settings.std))
    finish = partial(_to_normalized, mean, std)
    return partial(train_peer if split == "train" else eval_peer, settings, finish)


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _to_normalized(mean: torch.Tensor, std: torch.Tensor, image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


OPENERS: dict[str, OpenStream] = {
    "ours": open_threads,
    "processes": open_processes,
    "dataloader": open_dataloader,
    "webdataset": open_webdataset,
}


def ratios(results: Sequence[RowRates]) -> dict[str, float]:
    """Our fastest row over the fastest of each kind of peer: medians of the rounds' ratios."""
    fastest: dict[str, RowRates] = {}
    for result in results:
        best = fastest.get(result.row.kind)
        if best is None or result.median > best.median:
            fastest[result.row.kind] = result
    ours = fastest.pop("ours", None)
    if ours is None:
        return {}
    return {
        f"{ours.row.name} / {peer.row.name}": statistics.median(
            mine / theirs for mine, theirs in zip(ours.rates, peer.rates, strict=True)
        )
        for peer in fastest.values()
    }


class StubbedImages(Source):
    """Labels and offsets of `count` samples, like an index of shards, with one image for all."""

    def __init__(self, count: int, image_size: int) -> None:
        self.classes = numbered_classes(_CLASSES)
        self.labels = np.arange(count, dtype=np.int64) % _CLASSES
        self._offsets: Int64 = np.arange(count, dtype=np.int64) * 110_592
        self._pixels = np.zeros((image_size, image_size, 3), dtype=np.uint8)

    def read(self, i: int) -> npt.NDArray[np.uint8]:
        return self._pixels

    def name(self, i: int) -> str:
        return f"stub:{self._offsets[i]}"

    def close(self) -> None:
        """Nothing to close."""


def measure_memory(
    samples: int, *, batch_size: int, image_size: int, workers: int, on_progress: OnProgress
) -> dict[str, Any]:
    """Resident memory in MiB, twenty times during an epoch of `samples` stubbed samples, and the time
    to seek to its middle."""
    settings = DataSettings(
        source="synthetic", image_size=image_size, eval_resize=0, augment="none", flip=False,
        workers=workers, resident="off",
    )  # fmt: skip
    before_mib = resident_mib()
    started = time.perf_counter()
    source = StubbedImages(samples, image_size)
    middle = BatchPlan(samples, 1, batch_size, batch_size, 1).total_steps // 2
    with _loader(source, settings, batch_size, middle) as loader:
        next(loader)
        seek_s = time.perf_counter() - started
    on_progress(f"seek to step {middle:,}: {seek_s:.2f} s")
    marks: list[float] = []
    done, began = 0, time.perf_counter()
    with _loader(source, settings, batch_size, 0) as loader:
        for batch in loader:
            done += len(batch)
            if done * _MARKS >= samples * (len(marks) + 1):
                marks.append(resident_mib())
                on_progress(f"{done:,} samples: {marks[-1]:,.0f} MiB resident")
    seconds = time.perf_counter() - began
    return {
        "samples": samples, "batch_size": batch_size, "image_size": image_size, "workers": workers,
        "seek_s": seek_s, "before_mib": before_mib, "resident_mib": marks,
        "most_mib": max(marks), "grown_mib": marks[-1] - marks[len(marks) // 10],
        "samples_per_s": done / seconds,
    }  # fmt: skip


def _loader(
    source: StubbedImages, settings: DataSettings, batch_size: int, first_step: int
) -> TrainBatches:
    plan = BatchPlan(len(source), 1, batch_size, batch_size, 1)
    return create_train_loader(
        source, plan, settings, seed=0, rank=0, first_step=first_step, device=torch.device("cpu")
    )


def resident_mib() -> float:
    """Resident memory of this process; Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(
    data_dir: str = typer.Option("", help="Our images: shards or class folders (docs/data.md)."),
    peer_dir: str = typer.Option("", help="The peers' images, if they are others."),
    split: str = typer.Option("train", help="train (random crops) or val (centre crops)."),
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Images of a batch."),
    image_size: int = typer.Option(224, help="Edge of the crops in pixels."),
    rounds: int = typer.Option(5, help="Each measures every row once; the median counts."),
    seconds: float = typer.Option(5.0, help="For each row of a round."),
    workers: str = typer.Option("2", help="Our threads; several counts with commas."),
    peers: str = typer.Option("dataloader,webdataset", help="Also processes: our own in them."),
    peer_workers: str = typer.Option("1,2,3,4", help="The peers' processes, with commas."),
    settings: list[str] = typer.Option([], "--set", help="data.KEY=VALUE of our rows."),
    device: str = typer.Option("auto", help="auto, cpu or cuda: the place of the batches."),
    synthetic_index: int = typer.Option(0, help="Instead: memory and seek on so many samples."),
    as_json: options.AsJson = False,
) -> None:
    """Images/s as normalised tensors: ours against torch's DataLoader with Pillow, and webdataset."""
    check_at_least(1, {"--batch-size": batch_size, "--rounds": rounds})
    ours, chosen = parse_counts("--workers", workers), chosen_device(device)
    found: dict[str, Any] = {}
    if synthetic_index:
        if synthetic_index < batch_size:
            raise ConfigError("--synthetic-index", synthetic_index, "is less than a batch")
        with one_torch_thread():
            found["memory"] = measure_memory(
                synthetic_index, batch_size=batch_size, image_size=image_size, workers=ours[0],
                on_progress=report_progress,
            )  # fmt: skip
    else:
        common, changed = (split, batch_size, image_size, chosen), parse_data_settings(settings)
        rows = input_rows("ours", ours, data_dir, *common, changed)
        theirs, notes = parse_counts("--peer-workers", peer_workers), []
        for peer in _names(peers):
            folder = peer_dir or data_dir
            if problem := no_webdataset(folder, split) if peer == "webdataset" else None:
                notes.append(f"webdataset: not measured: {problem}")
                report_progress(notes[-1])
            elif peer == "processes":
                rows += input_rows(peer, theirs, data_dir, *common, changed)
            else:
                rows += input_rows(peer, theirs, folder, *common, {})
        results = measure_rows(
            rows, rounds=rounds, seconds=seconds, on_progress=report_progress,
            open_stream=lambda row: OPENERS[row.kind](row),
        )  # fmt: skip
        found |= {
            "rows": [result.to_dict() for result in results], "ratios": ratios(results),
            "notes": notes,
        }  # fmt: skip
    if as_json:
        asked = {
            "split": split, "batch_size": batch_size, "image_size": image_size, "rounds": rounds,
            "seconds": seconds, "device": chosen, "set": settings,
        }  # fmt: skip
        print_json({"settings": asked, **found, **environment(chosen)})
        return
    if memory := found.get("memory"):
        sys.stdout.write(
            f"{memory['samples']:,} samples: at most {memory['most_mib']:,.0f} MiB resident, "
            f"{memory['grown_mib']:+.1f} MiB from a tenth of the epoch to its end; "
            f"seek to its middle in {format_duration(memory['seek_s'])}\n"
        )
        return
    print_input_rows(found["rows"])
    for name, value in found["ratios"].items():
        sys.stdout.write(f"{name}: {value:.2f} ×\n")


def _names(text: str) -> list[str]:
    names, known = [name for name in text.split(",") if name], list(OPENERS)[1:]
    for name in names:
        if name not in known:
            raise ConfigError("--peers", name, "unknown", f"use {', '.join(known)}")
    return names


if __name__ == "__main__":
    run(main)
