"""`RunConfig`: everything that defines a run, assembled from the rooms' own settings.

In: a recipe (shipped, by name, or a TOML file) and overriding values. Order: defaults < recipe <
flags. Out: one frozen object, and the TOML that reproduces it. Unknown keys fail.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from paceline.comm.settings import CommSettings
from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import flatten, from_table, to_table
from paceline.core.untrusted import ParseError, parse_toml
from paceline.data import DataSettings
from paceline.models.settings import ModelSettings
from paceline.optim.settings import OptimSettings
from paceline.precision.settings import PrecisionSettings

RECIPES = Path(__file__).parent / "recipes"
DEVICES = ("auto", "cpu", "cuda")
SWITCHES = ("auto", "on", "off")
# Parameters of Beta distributions: below, shares are 0 or 1; above, all the same.
MIXES = (0.01, 100.0)
# The quickstart's own share, and more than most recipes have; those with more state it themselves.
WARMUP_MAX_SHARE = 0.2
SIGNAL_ACTIONS = ("save", "stop")
COMPILE_MODES = ("auto", "off", "blocks", "model")
# More than any node has cores; torch accepts 2^31 - 1 and then fails to start them.
MOST_THREADS = 4096
Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class RunSettings:
    """How long, how large, on what, and what to write.

    `global_batch_size` is that of all ranks together, `batch_size` the micro-batch of one process;
    unset, the first is 256 and the second the largest share of at most 256. `threads` = 0 shares the
    node's cores out among its ranks. `resume` is `auto`, a run folder or a checkpoint. `target_top1`
    (percent) ends the run once it is reached. `max_skipped_steps` non-finite gradients in a row end it
    as diverged. `device` is auto, cpu or cuda. `channels_last` keeps weights and activations in NHWC.

    `mixup` and `cutmix` mix each training image with another of its micro-batch: the parameters of their
    Beta distributions, 0 is off; with both on, each image takes one of the two.

    `average_epochs`: evaluation, best checkpoint and export take weights averaged over so many epochs.

    `fused_norm` (auto, on, off) takes our kernels for batch norm with ReLU, sum and pool: auto on a GPU
    for the models that have them. `compile` is torch.compile: off, blocks (each residual block), model
    (all of it), or auto: model on a GPU where fused_norm has nothing to offer. `cuda_graphs` (auto, on,
    off) records micro-step and update and replays them: auto on a GPU.

    `trace` writes `trace.json` into the run's folder, for Perfetto: what each rank computed and exchanged
    when, in the steps from the first to the second of `trace_steps`.
    """

    name: str = "run"
    epochs: int = 90
    global_batch_size: int | None = None
    batch_size: int | None = None
    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    average_epochs: float = 0.0
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    channels_last: bool = True
    fused_norm: str = "auto"
    compile: str = "auto"
    cuda_graphs: str = "auto"
    output: str = ""
    resume: str = ""
    pretrained: str = ""
    log_interval: int = 10
    eval_interval_epochs: int = 1
    target_top1: float | None = None
    max_skipped_steps: int = 50
    tensorboard: bool = False
    trace: bool = False
    trace_steps: tuple[int, int] = (10, 30)

    def __post_init__(self) -> None:
        for name in ("epochs", "log_interval", "eval_interval_epochs", "max_skipped_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name}", getattr(self, name), "must be at least 1")
        for name in ("global_batch_size", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"run.{name}", value, "must be at least 1")
        if not 0 <= self.smoothing < 1:
            raise ConfigError("run.smoothing", self.smoothing, "must be in [0, 1)", "try 0.1")
        for name in ("mixup", "cutmix"):
            value = getattr(self, name)
            if value != 0 and not MIXES[0] <= value <= MIXES[1]:
                raise ConfigError(
                    f"run.{name}", value, f"must be 0 (off), or from {MIXES[0]} to {MIXES[1]}",
                    "try 0.2" if name == "mixup" else "try 1.0",
                )  # fmt: skip
        if not 0 <= self.average_epochs < math.inf:
            raise ConfigError(
                "run.average_epochs", self.average_epochs, "must be 0 (off) or more", "try 5.0"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError("run.seed", self.seed, "must be 0 or more, and below 2^63")
        if not 0 <= self.threads <= MOST_THREADS:
            raise ConfigError(
                "run.threads", self.threads, f"must be from 0 (automatic) to {MOST_THREADS}",
                "leave it out: each rank then takes its share of the cores",
            )  # fmt: skip
        if self.target_top1 is not None and not 0 < self.target_top1 <= 100:
            raise ConfigError(
                "run.target_top1", self.target_top1, "must be a percentage in (0, 100]"
            )
        first, last = self.trace_steps
        if not 1 <= first <= last < first + 1000:
            raise ConfigError(
                "run.trace_steps", list(self.trace_steps), "must be first and last of at most 1000 steps",
                "try [10, 30]",
            )  # fmt: skip
        for name, known in (
            ("device", DEVICES),
            ("fused_norm", SWITCHES),
            ("compile", COMPILE_MODES),
            ("cuda_graphs", SWITCHES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"run.{name}", value, "unknown", nearest(value, known))
        if self.fused_norm == "on" and self.compile not in ("auto", "off"):
            raise ConfigError(
                "run.fused_norm", "on", f"cannot be compiled by run.compile = {self.compile!r}",
                "choose one of the two",
            )  # fmt: skip


@dataclass(frozen=True)
class CheckpointSettings:
    """When to save and what to keep.

    0 switches an interval off; a signal and the end of a run always save. The last `keep` stay, and,
    with `keep_best`, the one of the best top-1 as `best.pt`. `on_sigusr1` and `on_sigusr2` set what these
    signals do: `save` (and go on) or `stop` (after a save, as SIGTERM does).

    `salvage`: after the loss of another rank the lowest one that is left saves its last completed step,
    with its own batch-norm statistics for all. `accept_salvaged`: a run may resume from that checkpoint.
    """

    interval_epochs: int = 1
    interval_steps: int = 0
    keep: int = 2
    keep_best: bool = True
    on_sigusr1: str = "save"
    on_sigusr2: str = "stop"
    salvage: bool = True
    accept_salvaged: bool = True

    def __post_init__(self) -> None:
        for name in ("interval_epochs", "interval_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"checkpoint.{name}", getattr(self, name), "must be 0 or more")
        if self.keep < 1:
            raise ConfigError("checkpoint.keep", self.keep, "must be at least 1")
        for name in ("on_sigusr1", "on_sigusr2"):
            value = getattr(self, name)
            if value not in SIGNAL_ACTIONS:
                raise ConfigError(
                    f"checkpoint.{name}", value, "unknown", nearest(value, SIGNAL_ACTIONS)
                )


@dataclass(frozen=True)
class RunConfig:
    """One section for each room that has settings."""

    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    comm: CommSettings = field(default_factory=CommSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> RunConfig:
        """Builds the configuration; a section or key that does not exist fails by name."""
        values: dict[str, Any] = {}
        for section, table in tables.items():
            if not isinstance(table, dict):
                raise ConfigError(section, table, "stands outside a section", _nearest_key(section))
            if section not in SECTIONS:
                raise ConfigError(section, None, "unknown section", nearest(section, SECTIONS))
            values[section] = from_table(SECTIONS[section], section, table)
        return cls(**values)

    def to_tables(self) -> Tables:
        return {f.name: to_table(getattr(self, f.name)) for f in fields(self)}

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_tables())

    def flat(self) -> dict[str, Any]:
        """`{"run.seed": 0, …}`."""
        return flatten(self.to_tables())

    def with_values(self, values: Mapping[str, Any]) -> RunConfig:
        """A copy with `{"section.key": value}` laid over it."""
        return RunConfig.from_tables(merge(self.to_tables(), unflatten(values)))


SECTIONS: dict[str, type] = {
    "run": RunSettings,
    "data": DataSettings,
    "model": ModelSettings,
    "optim": OptimSettings,
    "precision": PrecisionSettings,
    "comm": CommSettings,
    "checkpoint": CheckpointSettings,
}


def _nearest_key(name: str) -> str:
    """The nearest `section.key`, found by the key alone where no section is given."""
    known = {f.name: f"{s}.{f.name}" for s, kind in SECTIONS.items() for f in fields(kind)}
    hint = nearest(name.rpartition(".")[2], known)
    for key, full in known.items():
        hint = hint.replace(f"{key!r}", f"{full!r}")
    return hint if hint.startswith("did you mean") else "give it as section.key"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def read_recipe(name: str) -> Tables:
    """The tables of a shipped recipe, or of a TOML file where `name` is a path."""
    path = RECIPES / f"{name}.toml"
    if name not in recipe_names():
        path = Path(name)
        if path.suffix != ".toml" and not path.is_file():
            raise ConfigError("recipe", name, "unknown", nearest(name, recipe_names()))
    try:
        tables = parse_toml(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            "recipe", name, "no such file", "shipped: " + ", ".join(recipe_names())
        ) from None
    except OSError as error:
        raise ConfigError("recipe", name, f"cannot be read ({error})") from None
    except ParseError as error:
        raise ConfigError("recipe", name, f"is not TOML: {error}", "mend that line") from None
    tables.setdefault("run", {})
    if isinstance(tables["run"], dict):
        tables["run"].setdefault("name", path.stem)
    return tables


def load_config(recipe: str | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Defaults < recipe < overrides (`{"section.key": value}`)."""
    tables = read_recipe(recipe) if recipe else {}
    RunConfig.from_tables(tables)  # a mistake in the recipe is reported before one in a flag
    merged = merge(tables, unflatten(overrides))
    merged.setdefault("optim", {}).setdefault(
        "warmup_max_share", _warmup_share(tables, "optim.warmup_epochs" in overrides)
    )
    return RunConfig.from_tables(merged)


def _warmup_share(recipe: Tables, asked: bool) -> float:
    """The share of a run that warm-up may take where nobody sets it: without it `--epochs 2` would turn a
    recipe's 3 epochs of warm-up into the whole run, which would end at its peak rate."""
    if asked:
        return 1.0
    warmup = float(recipe.get("optim", {}).get("warmup_epochs", 0.0))
    share = warmup / int(recipe.get("run", {}).get("epochs", RunSettings.epochs))
    # Rounded up to whole percents, so that the recipe at its own length keeps every step of its warm-up.
    return max(WARMUP_MAX_SHARE, min(1.0, math.ceil(round(100 * share, 6)) / 100))


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Lays the sections of `above` over those of `below`, key by key."""
    merged = {section: dict(table) for section, table in below.items()}
    for section, table in above.items():
        merged.setdefault(section, {}).update(table)
    return merged


def with_defaults(tables: Mapping[str, Any]) -> Tables:
    """A configuration as it was written, and the defaults of settings that came later."""
    return merge(RunConfig().to_tables(), tables)


def unflatten(values: Mapping[str, Any]) -> Tables:
    """`{"run.seed": 1}` → `{"run": {"seed": 1}}`; a key without a section fails by name."""
    tables: Tables = {}
    for name, value in values.items():
        section, dot, key = name.partition(".")
        if not dot or not key:
            raise ConfigError(name, None, "is not of the form section.key", _nearest_key(name))
        tables.setdefault(section, {})[key] = value
    return tables


def parse_assignment(text: str) -> tuple[str, Any]:
    """`section.key=value`, as `--set` takes it."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError("--set", text, "is not of the form section.key=value")
    return name, parse_value(name, value.strip())


def parse_value(name: str, text: str) -> Any:
    """What a flag's text means for the setting `name`: TOML, or a number as Python writes it.

    A setting that is a text takes the words as they are, so that `--output 7` names a folder.
    """
    section, _, key = name.partition(".")
    hints = get_type_hints(SECTIONS[section]) if section in SECTIONS else {}
    try:
        value = parse_toml(f"value = {text}".encode(errors="surrogateescape"))["value"]
    except ParseError:
        value = text
    if hints.get(key) is str:
        return value if isinstance(value, str) else text
    if value is text:
        with contextlib.suppress(ValueError):
            return float(text)
    return value
