"""Trains the cells of the large-batch series one after the other in one process; can be broken off.

    python tools/large_batch_series.py --phase explore --out DIR --data cifar10=DIR --budget 500

A cell is set × model × epochs × batch × optimizer × ingredient × seed. Each finished cell appends one
line to OUT/results.jsonl: the cell, commit, resolved settings, top-1, times. Cells that the file holds
are skipped, those without data are named. No cell begins that is not expected to end within `--budget`
seconds, and one that does not is stopped with a checkpoint, from which the next call goes on.
Several processes share the cells of a phase with `--claims DIR`, each with another `--out`.
Data sets are decoded once and stay in memory; on a GPU each run keeps its own copy resident, and
kernels are compiled by the first run. tools/large_batch_table.py prints the tables.

Phases, the most informative cells first: `explore` (18 epochs, development sets), `few` (24 epochs, what
may help at few steps), `main` (30 epochs, four sets, three seeds), `long` (90 epochs), `models`, and
`smoke`, which takes a minute on a CPU. The rule must be fixed before `main`: `explore` and `few` touch
neither tinyimagenet60 nor a model without batch norm.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.config import Job, RunConfig
from paceline.core.errors import PacelineError
from paceline.core.events import Event, StepEvent
from paceline.data import DataSettings, Source, SyntheticImages, open_source
from paceline.optim.scaling import BASES
from paceline.optim.settings import KnownGood
from paceline.train.components import Components
from paceline.train.resolve import Facts, resolve
from paceline.train.run import RunOutcome, run_training

SMALL = 256
# Pace of Muon at the small batch, times the root of the steps an epoch: the best of three tries there.
SMALL_PACE = 0.23
# At 5 steps an epoch the shortest run in the rule's range.
EXPLORED = 18
# Not the length of `main`, whose means are to have no seed that chose the rule.
FEW = 24
# The small-batch recipe, the same for all sets and models; pixels follow the image's size.
BASE: dict[str, Any] = {
    "run.smoothing": 0.1,
    "run.cutmix": 0.5,
    "optim.lr_base": 0.2,
    "optim.nesterov": True,
    "optim.weight_decay": 5e-4,
    "optim.warmup_epochs": 5.0,
    "optim.warmup_max_share": 0.2,
    "optim.schedule": "cosine",
    "data.augment": "pad_crop",
    "data.eval_resize": 0,
    "data.source": "python",
    "model.zero_init_gamma": False,
    "checkpoint.interval_epochs": 0,
    "checkpoint.keep_best": False,
    "run.log_interval": 1000000,
}


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Samples and classes are known before the data is opened, for batches and for the plan of a call."""

    samples: int
    classes: int
    pixels: int
    channels: int = 3
    mean: tuple[float, ...] = (0.48, 0.45, 0.40)
    std: tuple[float, ...] = (0.25, 0.25, 0.25)
    small: int = SMALL


SETS = {
    "cifar10": ImageSet(50_000, 10, 32, 3, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "fashion": ImageSet(60_000, 10, 28, 1, (0.286,), (0.353,)),
    "tinyimagenet25": ImageSet(12_500, 25, 64),
    "tinyimagenet60": ImageSet(30_000, 60, 64),
    "synthetic": ImageSet(640, 4, 12, 1, (0.5,), (0.25,), small=16),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """`batch` is `small`, or the number of steps an epoch as a text; `optimizer` is `rule` (what the
    scaling rule chooses) or a name."""

    set: str
    model: str
    epochs: int
    batch: str
    optimizer: str
    ingredient: str = "rule"
    seed: int = 0

    @property
    def key(self) -> str:
        return "/".join(str(value) for value in dataclasses.astuple(self))

    @property
    def global_batch(self) -> int:
        images = SETS[self.set]
        return images.small if self.batch == "small" else images.samples // int(self.batch)


def _average(config: RunConfig, cell: Cell) -> dict[str, Any]:
    steps = SETS[cell.set].samples / cell.global_batch
    return {"run.average_epochs": max(cell.epochs / 15, 2 / steps)}


def _eta_of(optimizer: str) -> str:
    return f"optim.{optimizer}.trust_coefficient"


def _eta(config: RunConfig) -> float:
    return float(getattr(config.optim.own_optimizer, "trust_coefficient"))  # noqa: B009


def _linear_pace(config: RunConfig, cell: Cell) -> dict[str, Any]:
    """Linear instead of root scaling, from Muon's pace at the small batch."""
    images = SETS[cell.set]
    small = SMALL_PACE / math.sqrt(images.samples / images.small)
    pace = small * cell.global_batch / images.small
    assert config.optim.lr is not None
    return {_eta_of(config.optim.name): pace * (1 - config.optim.momentum) / config.optim.lr}


def _paced(factor: float) -> Callable[[RunConfig, Cell], dict[str, Any]]:
    return lambda config, cell: {_eta_of(config.optim.name): _eta(config) * factor}


def _momentum(value: float) -> Callable[[RunConfig, Cell], dict[str, Any]]:
    """Another momentum at the same pace."""

    def change(config: RunConfig, cell: Cell) -> dict[str, Any]:
        eta = _eta(config) * (1 - value) / (1 - config.optim.momentum)
        return {"optim.momentum": value, _eta_of(config.optim.name): eta}

    return change


def _bias_rate(factor: float) -> Callable[[RunConfig, Cell], dict[str, Any]]:
    """Another rate for biases and norms, the same pace for the other layers."""

    def change(config: RunConfig, cell: Cell) -> dict[str, Any]:
        assert config.optim.lr is not None
        return {
            "optim.lr": config.optim.lr * factor,
            _eta_of(config.optim.name): _eta(config) / factor,
        }

    return change


def _group(config: RunConfig, cell: Cell) -> dict[str, Any]:
    """Batch norm over up to 1,000 samples; a batch that grows has whole groups at first too."""
    batch = math.gcd(cell.global_batch, config.run.global_batch_size or 0)
    return {"run.batch_size": max(d for d in range(1, min(1000, batch) + 1) if batch % d == 0)}


def _growth(share: float) -> Callable[[RunConfig, Cell], dict[str, Any]]:
    """A batch that grows by the rule does so after another share of the run; with 0 it does not grow."""

    def change(config: RunConfig, cell: Cell) -> dict[str, Any]:
        first, batch = config.run.global_batch_size, cell.global_batch
        if first is None or config.optim.lr is None or not config.optim.batch_schedule:
            return {}
        if share:
            return {"optim.batch_schedule": f"{cell.epochs * share:g}:{batch}"}
        return {
            "run.global_batch_size": batch, "optim.batch_schedule": "", "optim.batch_rate": "auto",
            "optim.lr": config.optim.lr * math.sqrt(batch / first),
        }  # fmt: skip

    return change


def _small_growth(config: RunConfig, cell: Cell) -> dict[str, Any]:
    """A quarter of the batch for half of the run, as the rule grows a large one; batch norm's group,
    which the rule keeps, is that quarter here."""
    assert config.optim.lr is not None
    return {
        "run.global_batch_size": cell.global_batch // 4, "optim.lr": config.optim.lr / 2,
        "optim.batch_schedule": f"{cell.epochs / 2:g}:{cell.global_batch}", "optim.batch_rate": "sqrt",
    }  # fmt: skip


def _schedule_free(config: RunConfig, cell: Cell) -> dict[str, Any]:
    """The interpolation takes the place of momentum; the pace stays."""
    eta = _eta(config) / (1 - config.optim.momentum)
    return {
        "optim.schedule_free": 0.9, "optim.schedule": "constant", "optim.momentum": 0.0,
        "optim.nesterov": False, _eta_of(config.optim.name): eta, "run.average_epochs": 0.0,
    }  # fmt: skip


# What each changes in the settings that the rule chose.
INGREDIENTS: dict[str, Callable[[RunConfig, Cell], dict[str, Any]]] = {
    "rule": lambda config, cell: {},
    "no-warm-up": lambda config, cell: {"optim.warmup_epochs": 0.0},
    "no-average": lambda config, cell: {"run.average_epochs": 0.0},
    "average": _average,
    "decay-all": lambda config, cell: {"optim.decay_bias_norm": True},
    "norm-group-1000": _group,
    "pace-half": _paced(0.5),
    "pace-1.4": _paced(1.4),
    "pace-double": _paced(2.0),
    "pace-linear": _linear_pace,
    "schedule-free": _schedule_free,
    "no-cutmix": lambda config, cell: {"run.cutmix": 0.0},
    "no-cutmix-linear": lambda config, cell: {
        "run.cutmix": 0.0,
        "optim.schedule": "poly",
        "optim.poly.power": 1.0,
    },
    "cutmix": lambda config, cell: {"run.cutmix": 0.5},
    "cosine": lambda config, cell: {"optim.schedule": "cosine"},
    "no-hole": lambda config, cell: {"data.cutout": 0},
    "linear-decay": lambda config, cell: {"optim.schedule": "poly", "optim.poly.power": 1.0},
    "momentum-0.8": _momentum(0.8),
    "momentum-0.95": _momentum(0.95),
    "bias-rate-quarter": _bias_rate(0.25),
    "bias-rate-double": _bias_rate(2.0),
    "orthogonal-all": lambda config, cell: {"optim.muon.orthogonal": "all"},
    # What the rule lets the optimizer decide by the net, for the small batch too.
    "by-net": lambda config, cell: {"optim.muon.orthogonal": "auto", "optim.muon.steps": "auto"},
    "zero-gamma": lambda config, cell: {"model.zero_init_gamma": True},
    "no-smoothing": lambda config, cell: {"run.smoothing": 0.0},
    "growth-third": _growth(1 / 3),
    "growth-two-thirds": _growth(2 / 3),
    "no-growth": _growth(0),
    "small-growth": _small_growth,
}


def cell_config(
    cell: Cell, folder: Path, device: str = "auto", **more: Any
) -> tuple[RunConfig, str]:
    """The settings of a run, and what the scaling rule chose."""
    images, known = SETS[cell.set], KnownGood(optimizer="sgd")
    values = BASE | {
        "run.name": cell.key.replace("/", "-"),
        "run.epochs": cell.epochs,
        "run.eval_interval_epochs": cell.epochs,
        "run.global_batch_size": cell.global_batch,
        "optim.known_good_batch": images.small,
        "optim.lr_base_batch": images.small,
        "run.seed": cell.seed,
        "run.output": str(folder),
        "run.device": device,
        "model.name": cell.model,
        "model.num_classes": images.classes,
        "data.image_size": images.pixels,
        "data.channels": images.channels,
        "data.mean": list(images.mean),
        "data.std": list(images.std),
        "data.crop_padding": images.pixels // 8,
        "data.cutout": images.pixels // 4,
    }
    if cell.model.startswith("resnet") and cell.model != "resnet_tiny":
        values["model.stem"] = "small"
    if cell.batch == "small":
        if cell.optimizer in ("lars", "muon"):
            steps, rate = images.samples / images.small, BASE["optim.lr_base"]
            pace = BASES["lars"].pace if cell.optimizer == "lars" else SMALL_PACE
            eta = pace / math.sqrt(steps) * (1 - 0.9) / rate
            values |= {"optim.lr": rate, _eta_of(cell.optimizer): eta}
        values["optim.name"] = cell.optimizer
    else:
        values["optim.scaling"] = "auto"
        if cell.optimizer != "rule":
            values["optim.name"] = cell.optimizer
            known = replace(known, keeps=("optim.name",))
    facts = Facts(
        job=Job(processes=1), program=Components(), samples=images.samples, classes=images.classes
    )
    given = RunConfig().with_values(values | more)
    found = resolve(replace(given, optim=replace(given.optim, known_good=known)), facts)
    config = found.config
    return config.with_values(INGREDIENTS[cell.ingredient](config, cell) | more), found.scaling


# --- which cells, in which order ------------------------------------------------------------------


def _grid(
    sets: Iterable[str], model: str, epochs: int, pairs: Iterable[tuple[str, str]],
    seeds: Iterable[int] = (0,), ingredients: Iterable[str] = ("rule",),
) -> list[Cell]:  # fmt: skip
    return [
        Cell(name, model, epochs, batch, optimizer, ingredient, seed)
        for seed in seeds
        for ingredient in ingredients
        for batch, optimizer in pairs
        for name in sets
    ]


def phase_cells(phase: str) -> list[Cell]:
    """Returns the cells in the order in which they run."""
    small = [("small", "sgd"), ("small", "muon")]
    large = [("20", "rule"), ("5", "rule")]
    if phase == "explore":
        sets = ("cifar10", "tinyimagenet25", "fashion")
        first = _grid(sets, "resnet18", EXPLORED, [*large, *small])
        paces = ("pace-double", "pace-half")
        tuned = _grid(
            sets, "resnet18", EXPLORED, [*large[::-1], ("small", "muon")], ingredients=paces
        )
        # What may help at the fewest steps, then what must not hurt.
        few = (
            "momentum-0.8", "cosine", "bias-rate-quarter", "cutmix", "no-average",
            "norm-group-1000", "no-warm-up", "momentum-0.95", "no-hole",
        )  # fmt: skip
        tuned += _grid(sets[:2], "resnet18", EXPLORED, large[1:], ingredients=few)
        others = _grid(
            sets[:2], "resnet18", EXPLORED,
            [("20", "lars"), ("5", "lars")],
        )  # fmt: skip
        # As many tries for the small batch.
        tries = ("no-cutmix", "no-cutmix-linear", "average", "linear-decay")
        others += _grid(sets, "resnet18", EXPLORED, small, ingredients=tries)
        rest = _grid(
            sets[:2], "resnet18", EXPLORED, large[:1],
            ingredients=("average", *few[:4], "no-warm-up", "norm-group-1000", "decay-all"),
        )  # fmt: skip
        rest += _grid(sets[:2], "resnet18", EXPLORED, [("20", "sgd")])
        rest += _grid(
            sets[:2], "resnet18", EXPLORED, large[1:],
            ingredients=("decay-all", "pace-linear", "schedule-free"),
        )  # fmt: skip
        return first + tuned + others + rest
    if phase == "few":
        changes = (
            "rule", "no-growth", "growth-third", "growth-two-thirds", "cutmix", "orthogonal-all",
            "no-smoothing", "zero-gamma", "bias-rate-double", "norm-group-1000",
        )  # fmt: skip
        sets = ("cifar10", "tinyimagenet25")
        found = _grid(sets, "resnet18", FEW, large[1:], ingredients=changes)
        found += _grid(sets[:1], "resnet18", FEW, large[:1], ingredients=changes)
        # At 20 steps an epoch the batch of tinyimagenet25 is too small to grow.
        alike = [name for name in changes if "growth" not in name]
        found += _grid(sets[1:], "resnet18", FEW, large[:1], ingredients=alike)
        tries = ("rule", "no-cutmix-linear", "orthogonal-all", "no-smoothing", "zero-gamma")
        return found + _grid(sets, "resnet18", FEW, [("small", "muon")], ingredients=tries)
    # Exploration found Muon ahead of SGD at the small batch; mixed images and cosine decay are tried too.
    best = [("small", "muon", "rule"), ("small", "muon", "no-cutmix-linear")]
    tried = [*((batch, optimizer, "rule") for batch, optimizer in large), *best]
    if phase == "main":
        sets = ("cifar10", "tinyimagenet60", "tinyimagenet25", "fashion")
        found = [
            Cell(name, "resnet18", 30, *way, seed)
            for seed in (1, 2, 3)
            for way in tried
            for name in sets
        ]
        single = [("small", "sgd"), ("20", "lars"), ("5", "lars")]
        return found + _grid(sets, "resnet18", 30, single, seeds=(1,))
    if phase == "long":
        sets = ("cifar10", "tinyimagenet60")
        return [
            Cell(name, "resnet18", 90, *way, seed)
            for seed in (1, 2, 3)
            for way in tried
            for name in sets
        ]
    if phase == "models":
        found = _grid(("cifar10", "tinyimagenet60"), "resnet50", 30, [*large, *small], (1,))
        for model in ("alexnet_bn", "alexnet"):
            sets = ("tinyimagenet60", "tinyimagenet25")
            found += _grid(sets, model, 30, [*large, *small], (1,))
            found += _grid(sets, model, 30, small[1:], (1,), ("by-net",))
        return found
    assert phase == "smoke", phase
    pairs = [("20", "rule"), ("5", "rule"), ("small", "sgd"), ("small", "muon"), ("5", "lars")]
    extra = _grid(
        ("synthetic",), "resnet_tiny", EXPLORED, [("5", "rule")], ingredients=("pace-half",)
    )
    return _grid(("synthetic",), "resnet_tiny", EXPLORED, pairs, seeds=(0, 1)) + extra


# --- data -----------------------------------------------------------------------------------------


class DecodedImages(Source):
    """A split decoded once, for all runs of the process."""

    is_in_memory = True

    def __init__(self, source: Source, images: ImageSet) -> None:
        self.classes = list(source.classes)
        self.labels = source.labels
        mode = "RGB" if images.channels == 3 else "L"
        made = np.empty((len(source), images.pixels, images.pixels, images.channels), np.uint8)
        for i in range(len(source)):
            stored = source.read(i)
            if isinstance(stored, bytes):
                picture = Image.open(io.BytesIO(stored)).convert(mode)
                stored = np.asarray(picture).reshape(*picture.size[::-1], images.channels)
            made[i] = stored
        self.pixels = made

    def read(self, i: int) -> Any:
        assert self.pixels is not None
        return self.pixels[i]


def open_set(name: str, directory: str | None) -> tuple[Source, Source]:
    """Training and validation images of a set, in memory."""
    images = SETS[name]
    if name == "synthetic":
        size = (images.classes, images.pixels, images.channels)
        parts: list[Source] = [
            SyntheticImages(images.samples, *size),
            SyntheticImages(256, *size, salt=1),
        ]
    else:
        settings = DataSettings(dir=directory, source="auto")
        train = open_source(settings, "train")
        parts = [train, open_source(settings, "val", train.classes)]
    decoded = [DecodedImages(part, images) for part in parts]
    if len(decoded[0]) != images.samples:
        raise PacelineError(
            f"{name} in {directory} has {len(decoded[0])} training images, not {images.samples}",
            "use the whole set",
        )
    return decoded[0], decoded[1]


# --- the series -----------------------------------------------------------------------------------


class StopAtDeadline:
    """Asks the run to save and stop once the budget is spent."""

    def __init__(self, deadline: float) -> None:
        self._deadline, self._asked = deadline, False

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepEvent) and not self._asked and time.monotonic() > self._deadline:
            self._asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Nothing is held."""


class Results:
    """OUT/results.jsonl: one line for each finished cell, whatever its end."""

    def __init__(self, path: Path, earlier: Sequence[Path] = ()) -> None:
        """`earlier`: files of calls on other machines, whose cells are finished too."""
        self.path = path
        self.records: list[dict[str, Any]] = []
        for file in (*earlier, path):
            self.records += read_results(file)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def keys(self) -> set[str]:
        return {record["key"] for record in self.records}

    def seconds_per_image(self, cell: Cell) -> float | None:
        """Of the latest run of the same model and image size on this device; with `small` batches apart,
        whose steps cost more."""
        for record in reversed(self.records):
            other = SETS[record["set"]]
            alike = record["model"] == cell.model and other.pixels == SETS[cell.set].pixels
            if alike and (record["batch"] == "small") == (cell.batch == "small"):
                return float(record["wall_s"] / (other.samples * record["epochs"]))
        return None


def read_results(path: Path) -> list[dict[str, Any]]:
    """The records; a last line that a kill cut short is passed over."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    whole, cut = lines[:-1], lines[-1]
    if cut and os.access(path, os.W_OK):
        path.write_bytes(b"\n".join([*whole, b""]))
    return [json.loads(line) for line in whole if line.strip()]


def commit() -> str:
    """Returns the commit of this checkout, marked if files differ from it."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def run_cell(
    cell: Cell, data: tuple[Source, Source], out: Path, deadline: float, device: str = "auto",
    **more: Any,
) -> dict[str, Any] | None:  # fmt: skip
    """The record of a finished or failed cell; None if the deadline stopped it."""
    folder = out / "runs" / cell.key.replace("/", "-")
    resume = "auto" if any((folder / "checkpoints").glob("step-*.pt")) else ""
    record: dict[str, Any] = {"key": cell.key, **dataclasses.asdict(cell)}
    record |= {"global_batch": cell.global_batch, "time": time.time()}
    started = time.monotonic()
    try:
        config, chosen = cell_config(cell, folder, device, **more, **{"run.resume": resume})
        record |= {"chosen": chosen, "settings": _changed(config)}
        components = Components(train_data=data[0], val_data=data[1])
        outcome = run_training(config, lambda: StopAtDeadline(deadline), components=components)
    except PacelineError as error:  # a diverged run is a result too
        return record | {"error": str(error), "top1": None, "wall_s": time.monotonic() - started}
    if outcome.result.stop_signal is not None:
        return None
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return record | _outcome(outcome) | {"wall_s": time.monotonic() - started}


def _outcome(outcome: RunOutcome) -> dict[str, Any]:
    names = ("top1", "top5", "val_loss", "steps", "train_s", "images_per_s", "weights_sha256",
             "skipped_steps", "noise_scale", "versions", "hardware")  # fmt: skip
    return {name: outcome.summary.get(name) for name in names}


def _changed(config: RunConfig) -> dict[str, Any]:
    plain = RunConfig().flat()
    local = ("run.output", "run.resume", "run.name")
    return {k: v for k, v in config.flat().items() if v != plain.get(k) and k not in local}


def _claim(claims: Path, cell: Cell) -> bool:
    claims.mkdir(parents=True, exist_ok=True)
    try:
        (claims / cell.key.replace("/", "-")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run_series(
    cells: Sequence[Cell], out: Path, data_dirs: dict[str, str], budget_s: float,
    device: str = "auto", say: Callable[[str], None] = print, earlier: Sequence[Path] = (),
    made_at: str = "", claims: Path | None = None, **more: Any,
) -> str:  # fmt: skip
    """Runs what is left of `cells`, and not claimed by another process; why it ended: `done`, or
    `budget`."""
    started = time.monotonic()
    deadline = started + budget_s
    out.mkdir(parents=True, exist_ok=True)
    results, opened = Results(out / "results.jsonl", earlier), dict[str, tuple[Source, Source]]()
    absent = {cell.set for cell in cells if cell.set != "synthetic"} - data_dirs.keys()
    for name in sorted(absent):
        say(f"{name}: no --data {name}=DIR, its cells are left out")
    finished = results.keys()
    left = [cell for cell in cells if cell.key not in finished and cell.set not in absent]
    for number, cell in enumerate(left, 1):
        remaining = deadline - time.monotonic()
        cost = results.seconds_per_image(cell)
        images = SETS[cell.set].samples * cell.epochs
        # An unknown cost is tried while most of the budget is left: the run can be broken off.
        fits = remaining > images * cost if cost is not None else remaining > 0.5 * budget_s
        if remaining <= 0 or not fits:
            say(f"budget: {len(left) - number + 1} cells left, next {cell.key}")
            return "budget"
        if claims is not None and not _claim(claims, cell):
            continue
        if cell.set not in opened:
            opened[cell.set] = open_set(cell.set, data_dirs.get(cell.set))
        record = run_cell(cell, opened[cell.set], out, deadline, device, **more)
        if record is None:
            if claims is not None:
                (claims / cell.key.replace("/", "-")).unlink()
            say(f"{cell.key}: stopped at the budget, continues in the next call")
            return "budget"
        results.add(record | {"commit": made_at or commit()})
        top1 = f"top-1 {record['top1']:.2f} %" if record["top1"] is not None else record["error"]
        say(f"[{number}/{len(left)}] {cell.key}: {top1}, {record['wall_s']:.1f} s")
    say("done: all cells of the phase have a result")
    return "done"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    phases = ("explore", "few", "main", "long", "models", "smoke")
    parser.add_argument("--phase", choices=phases, required=True)
    parser.add_argument("--out", type=Path, required=True, help="results.jsonl and run folders")
    parser.add_argument("--data", action="append", default=[], metavar="SET=DIR")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for this call")
    parser.add_argument("--only", default="*", help="pattern of cell keys, as cifar10/*")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--done", type=Path, action="append", default=[], metavar="FILE",
                        help="results.jsonl of an earlier call elsewhere")  # fmt: skip
    parser.add_argument("--claims", type=Path, help="of processes that share the cells")
    parser.add_argument("--commit", default="", help="if the checkout has no .git")
    parser.add_argument("--list", action="store_true", help="print the cells and their batches")
    options = parser.parse_args(arguments)
    data_dirs = {}
    for text in options.data:
        name, equals, directory = text.partition("=")
        if not equals or name not in SETS:
            parser.error(f"--data {text}: write SET=DIR, with a set of {', '.join(SETS)}")
        data_dirs[name] = directory
    cells = [c for c in phase_cells(options.phase) if fnmatch.fnmatch(c.key, options.only)]
    if options.list:
        for cell in cells:
            print(f"{cell.key}  batch {cell.global_batch:,}")
        return 0
    try:
        run_series(
            cells, options.out, data_dirs, options.budget, options.device, earlier=options.done,
            made_at=options.commit, claims=options.claims,
        )  # fmt: skip
    except PacelineError as error:
        print(f"large_batch_series: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
