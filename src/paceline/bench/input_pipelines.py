"""The pipelines that `paceline bench input` measures: ours, torch's DataLoader with Pillow, and the
webdataset library; and training from real compared with synthetic images.

Our rows run in threads, as in training, or in processes: torch's DataLoader workers, each with our loader
without threads, whose batches come back through shared memory. Workers of peers are processes that live
through the whole measurement, with one torch thread each; they decode, augment, normalize and collate.
Epochs never end, so that no peer pays for starting one.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import io
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from paceline.bench.input_rows import InputRow, InputStream, OnProgress, open_repeated
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import DataError, RunError
from paceline.core.topology import Topology
from paceline.data import (
    Batch,
    BatchPlan,
    DataSettings,
    EvalBatches,
    Normalizer,
    Source,
    TrainBatches,
    create_eval_loader,
    create_train_loader,
    open_source,
    random_box,
    sum_by_stage,
)
from paceline.data.augment import draws
from paceline.models.settings import check_model_name
from paceline.train.step import TrainStep
from paceline.tune.step import StepRow, SyntheticBatches
from paceline.tune.step import build_step as build
from paceline.tune.timing import steady_times

_EPOCHS = 1_000_000
# Warm-up steps of each turn, in addition to those with prefetched batches.
_SETTLE = 8


def normalized(batches: Iterator[Batch], row: InputRow) -> Iterator[torch.Tensor]:
    """Our batches, normalized on the device. None is held longer than that takes."""
    settings = row.settings
    normalize = Normalizer(settings.mean, settings.std, settings.channels, row.dtype)

    def made(batch: Batch) -> torch.Tensor:
        return normalize(batch.images, row.device)

    return map(made, batches)


def create_loader(
    row: InputRow, source: Source, *, rank: int = 0, world_size: int = 1
) -> TrainBatches | EvalBatches:
    """The loader that training or evaluation would use."""
    if row.split == "train":
        return create_train_loader_of(row, source, rank=rank, world_size=world_size)
    return create_eval_loader(
        source, row.settings, rank=rank, world_size=world_size, batch_size=row.batch_size,
        device=torch.device(row.device),
    )  # fmt: skip


def create_train_loader_of(
    row: InputRow, source: Source, *, rank: int = 0, world_size: int = 1
) -> TrainBatches:
    step = row.batch_size * world_size
    plan = BatchPlan(len(source), _EPOCHS, step, row.batch_size, world_size)
    return create_train_loader(
        source, plan, row.settings, seed=row.seed, rank=rank, first_step=0,
        device=torch.device(row.device),
    )  # fmt: skip


def endless(loader: TrainBatches | EvalBatches) -> Iterator[Batch]:
    """Repeats passes over validation images; the training stream never ends by itself."""
    while True:
        yield from loader


@contextmanager
def open_threads(row: InputRow) -> Iterator[InputStream]:
    settings = replace(row.settings, workers=row.workers)
    source = open_repeated(settings, row.split)
    try:
        with create_loader(replace(row, settings=settings), source) as loader:
            batches = normalized(endless(loader), row)
            yield InputStream(batches, settings.prefetch_batches, loader.describe(), loader.note)
    finally:
        source.close()


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


def measure_training(
    model: str, row: InputRow, switches: Mapping[str, Any], *, rounds: int, steps: int, warm_up: int,
    on_progress: OnProgress,
) -> dict[str, Any]:  # fmt: skip
    """Images/s of the training step with batches from the pipeline and with synthetic ones, in turns.
    `switches`: settings of the step.

    One step, captured and warmed up once, serves both. Each round times `steps` steps of each input;
    `warm_up` steps come before the first round. Rates come from sums, not medians, so that a stall
    counts in full.
    """
    settings = replace(row.settings, workers=row.workers)
    row = replace(row, settings=settings, split="train")
    stored = settings.prefetch_batches + _SETTLE
    total = warm_up + 2 * rounds * (steps + 2 * stored + 8)
    device = torch.device(row.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    check_model_name(model)
    source = open_repeated(settings, "train")
    step_row = StepRow(
        "training", "ours", model, row.batch_size, settings.image_size, len(source.classes),
        row.device, total, 1, dict(switches),
    )  # fmt: skip
    try:
        with (
            Group(Topology(), RunConfig().comm, device) as group,
            create_train_loader_of(row, source) as real,
        ):
            step, words = build(step_row, group)
            synthetic = SyntheticBatches(
                step_row.batch_size, step_row.image_size, step_row.classes, device
            )
            turns = _Turns(step, row.batch_size)
            step.loader = synthetic
            gc.collect()  # garbage of earlier rows must not be freed during a graph capture
            turns.measure(warm_up, 1)
            rates: dict[str, list[float]] = {"synthetic": [], "input": []}
            stalls: dict[str, list[dict[str, float]]] = {"synthetic": [], "input": []}
            for turn in range(rounds):
                for name in ("synthetic", "input") if turn % 2 else ("input", "synthetic"):
                    step.loader = synthetic if name == "synthetic" else real
                    rate, stall = turns.measure(steps, stored)
                    rates[name].append(rate)
                    stalls[name].append(stall)
                    on_progress(
                        f"round {turn + 1}: training, {name}: {rates[name][-1]:,.0f} images/s"
                    )
            described, remark = real.describe(), real.note()
    finally:
        source.close()
    return {
        "model": model, "batch_size": row.batch_size, "input": described, "remark": remark,
        "what": words,
        "synthetic_images_per_s": statistics.median(rates["synthetic"]),
        "input_images_per_s": statistics.median(rates["input"]),
        "share": statistics.median(
            a / b for a, b in zip(rates["input"], rates["synthetic"], strict=True)
        ),
        "input_stall_s_of_a_step": median_stall(stalls["input"]),
        "rounds": rates,
    }  # fmt: skip


def median_stall(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median over all rounds by cause; a missing cause counts as 0."""
    causes = dict.fromkeys(cause for stall in rounds for cause in stall)
    return {c: statistics.median(stall.get(c, 0.0) for stall in rounds) for c in causes}


class _Turns:
    """Runs a `TrainStep` with step numbers that increase from turn to turn."""

    def __init__(self, step: TrainStep, batch: int) -> None:
        self._step, self._batch = step, batch
        self._numbers = count()
        self._stalls: list[dict[str, float]] = []

    def measure(self, steps: int, warm_up: int) -> tuple[float, dict[str, float]]:
        """Images/s and the stall per step by cause, over `steps` steps after `warm_up` others."""
        self._stalls, lag = [], self._step.lag
        times = steady_times(self._launch, self._collect, lag=lag, repeats=steps, warm_up=warm_up)
        last = len(self._stalls) - lag  # later ones only drain the queue
        timed = self._stalls[last - steps : last]
        stall = {cause: seconds / len(timed) for cause, seconds in sum_by_stage(*timed).items()}
        return self._batch * len(times.seconds) / sum(times.seconds), stall

    def _launch(self, _: int) -> None:
        self._step.launch(next(self._numbers), 0.1)

    def _collect(self) -> None:
        outcome = self._step.collect()
        self._stalls.append(outcome.stall)
        if not math.isfinite(outcome.loss):
            raise RunError(f"the loss is {outcome.loss} at step {outcome.number}")


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
    """Why webdataset cannot be measured; None if it can."""
    if importlib.util.find_spec("webdataset") is None:
        return "the library is not installed (pip install webdataset, or paceline[bench])"
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
    box = random_box(image.width, image.height, row, settings.crop_scale, settings.crop_ratio)
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
