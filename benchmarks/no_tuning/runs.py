"""`Cell`: one training run of the comparison, and the code that makes it."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import paceline as pl
from benchmarks.no_tuning.data import STATISTICS, Subset, load
from benchmarks.no_tuning.nets import NETS
from benchmarks.no_tuning.peers import RATES, SCHEDULES, factory
from benchmarks.no_tuning.table import OURS, OURS_ALL
from paceline.core.errors import PacelineError
from paceline.core.events import Event
from paceline.models import ModelSettings, create_model
from paceline.optim.scaling import BASES, base_rate

# Methods: ours by the rule, also with its own warm-up and averaging; peers; one optimizer at a rate.
METHODS = (OURS, OURS_ALL, *RATES)
DATA_SETS, TABLE_NETS, BATCHES = (
    ("fashion", "cifar10", "tiny25"),
    ("resnet_tiny", "vit", "cnn"),
    (64, 2000),
)
# Epochs by batch, so that a run takes about a minute on one CPU thread.
EPOCHS, WARMUP_SHARE, MOMENTUM = {64: 5, 2000: 10}, 0.1, 0.9
LARGEST_MICRO_BATCH = 500
_CALIBRATION_IMAGES = 2000


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        data: Name of the data set.
        net: Name of the net.
        batch: Global batch.
        method: One of `METHODS`, or the name of an optimizer of Paceline.
        seed: Seed of initial weights, order and augmentation.
        epochs: Number of epochs.
        rate: Peak rate of an optimizer of Paceline, or pace of LARS and Muon; None for the rule's.
        settings: Further settings.
    """

    data: str
    net: str
    batch: int
    method: str
    seed: int = 0
    epochs: int = 10
    rate: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A text that identifies the run."""
        return repr(sorted(asdict(self).items()))

    @classmethod
    def of(cls, table: dict[str, Any]) -> Cell:
        """Returns the run of a JSON line."""
        names = cls.__dataclass_fields__
        return cls(**{name: value for name, value in table.items() if name in names})


class _Silent:
    def on_event(self, event: Event) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Nothing is held."""


def settings_of(cell: Cell, classes: int, channels: int, side: int, device: str) -> dict[str, Any]:
    """Returns the settings of a run, which are equal for all methods except for `[optim]`."""
    mean, std = STATISTICS[cell.data]
    values: dict[str, Any] = {
        "run.epochs": cell.epochs, "run.global_batch_size": cell.batch, "run.seed": cell.seed,
        "run.batch_size": min(cell.batch, LARGEST_MICRO_BATCH), "run.threads": 1,
        "run.device": device, "run.eval_interval_epochs": cell.epochs, "run.eval_details": "off",
        "run.smoothing": 0.1, "data.image_size": side,
        "data.channels": channels, "data.augment": "pad_crop", "data.crop_padding": side // 8,
        "data.mean": list(mean), "data.std": list(std), "data.eval_resize": 0, "data.workers": 1,
        "checkpoint.interval_epochs": 0, "checkpoint.keep_best": False, "checkpoint.background": False,
        "precision.amp_dtype": "fp32", "model.num_classes": classes,
    }  # fmt: skip
    if cell.method != OURS_ALL:
        values |= {
            "optim.warmup_epochs": WARMUP_SHARE * cell.epochs, "optim.warmup_max_share": 1.0,
            "run.average_epochs": 0.0,
        }  # fmt: skip
    if cell.method in RATES and cell.rate is None:
        values |= {
            "optim.lr": RATES[cell.method], "optim.schedule": SCHEDULES[cell.method],
            "optim.scaling": "off",
        }  # fmt: skip
    elif cell.method not in (OURS, OURS_ALL):
        values["optim.name"] = cell.method
        base = BASES[cell.method]
        if cell.rate is not None and base.pace:
            eta = cell.rate * (1 - MOMENTUM) / base_rate(cell.method, cell.batch)
            values[f"optim.{cell.method}.trust_coefficient"] = eta
        elif cell.rate is not None:
            values |= {"optim.lr": cell.rate, "optim.weight_decay": base.weight_decay}
    if cell.method != OURS_ALL:
        values["optim.batch_schedule"] = ""
    return values | cell.settings


def train(cell: Cell, data: Path, device: str, more: dict[str, Any]) -> dict[str, Any]:
    """Trains one run.

    Args:
        cell: The run.
        data: The folder of the subsets.
        device: `cpu` or `cuda`.
        more: Settings for all runs.

    Returns:
        The JSON line: the run, its accuracy in percent, its time, and its rate. A run that fails has the
        error instead of an accuracy; a run that diverges has the accuracy of its last weights. On a GPU,
        a run that fails is repeated without CUDA graphs.
    """
    line = _train_once(cell, data, device, more)
    if "error" in line and device == "cuda" and "run.cuda_graphs" not in more:
        again = _train_once(cell, data, device, more | {"run.cuda_graphs": "off"})
        line = again | {"error_with_graphs": line["error"]}
    return line


def _train_once(cell: Cell, data: Path, device: str, more: dict[str, Any]) -> dict[str, Any]:
    """Trains one run, as `train` does, but does not repeat it."""
    began = time.perf_counter()
    train_set, val_set = load(cell.data, data, "train"), load(cell.data, data, "val")
    assert train_set.pixels is not None
    _, side, _, channels = train_set.pixels.shape
    settings = settings_of(cell, len(train_set.classes), channels, side, device) | more
    is_peer = cell.method in RATES and cell.rate is None
    steps = math.ceil(len(train_set) * cell.epochs / cell.batch)
    torch.manual_seed(cell.seed)
    model = _create(cell.net, len(train_set.classes), channels, side)
    folder = Path(tempfile.mkdtemp(prefix="no-tuning-"))
    line: dict[str, Any] = asdict(cell)
    try:
        trainer = pl.Trainer(
            model, train_set, val_data=val_set, output=folder / "run", settings=settings,
            optimizer=factory(cell.method, steps) if is_peer else None,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = trainer.run(display=_Silent)
        line |= {"top1": outcome.summary["top1"], "used": _used(folder / "run")}
        if cell.method == "schedule-free" and is_peer:
            line["top1"] = _calibrated(model, cell.data, train_set, val_set, device)
    except PacelineError as error:
        line["error"] = str(error)
    except Exception:  # noqa: BLE001  (one run must not end the series)
        line["error"] = traceback.format_exc(limit=-3)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line["seconds"] = round(time.perf_counter() - began, 2)
    return line


def _create(net: str, classes: int, channels: int, side: int) -> nn.Module:
    kind = NETS[net]
    if isinstance(kind, str):
        settings = ModelSettings(name=kind)
        return create_model(settings, num_classes=classes, in_channels=channels)
    given = {"num_classes": classes, "in_channels": channels}
    return kind(**given, image_size=side) if net in ("vit", "mixer") else kind(**given)


def _used(folder: Path) -> dict[str, Any]:
    """Returns the section `[optim]` that a run has used, without defaults."""
    import tomllib

    tables = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    optim: dict[str, Any] = tables.get("optim", {})
    return optim


@torch.no_grad()
def _calibrated(model: nn.Module, name: str, train: Subset, val: Subset, device: str) -> float:
    """Computes batch-norm statistics for the averaged weights, as Schedule-Free needs, and evaluates."""
    model = model.to(device).float()
    mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in STATISTICS[name])

    def batches(subset: Subset, images: int) -> Any:
        for first in range(0, images, 250):
            pixels = torch.from_numpy(cast(Any, subset.pixels)[first : min(first + 250, images)])
            yield first, (pixels.to(device).permute(0, 3, 1, 2).float() / 255 - mean) / std

    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        model.train()
        for _, images in batches(train, _CALIBRATION_IMAGES):
            model(images)
    model.eval()
    correct = 0
    for first, images in batches(val, len(val)):
        labels = torch.tensor(val.labels[first : first + len(images)], device=device)
        correct += int((model(images).argmax(1) == labels).sum())
    return 100 * correct / len(val)


def table_cells(seeds: int, methods: tuple[str, ...] = METHODS) -> list[Cell]:
    """Returns the runs of the table, seed by seed."""
    return [
        Cell(data, net, batch, method, seed, EPOCHS[batch])
        for seed in range(seeds) for data in DATA_SETS for net in TABLE_NETS for batch in BATCHES
        for method in methods
    ]  # fmt: skip


def rate_cells(
    optimizer: str, rates: list[float | None], nets: tuple[str, ...], data: tuple[str, ...],
    batches: tuple[int, ...], seeds: int,
) -> list[Cell]:  # fmt: skip
    """Returns the runs of one optimizer at several rates; None is the rule's rate."""
    base = Cell("", "", 0, optimizer)
    return [
        replace(base, data=name, net=net, batch=batch, rate=rate, seed=seed)
        for seed in range(seeds) for batch in batches for net in nets for name in data
        for rate in rates
    ]  # fmt: skip
