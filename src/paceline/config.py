"""`RunConfig`: everything that defines a run, composed of the settings of the packages.

Values come from defaults, then a recipe (shipped, by name, or a TOML file), then flags. Unknown keys
fail.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from paceline.comm.settings import CommSettings
from paceline.core.errors import ConfigError, nearest
from paceline.core.imports import split_name
from paceline.core.settings import flatten, from_table, to_table
from paceline.core.untrusted import ParseError, parse_toml
from paceline.data import DataSettings
from paceline.models.settings import ModelSettings
from paceline.optim.scaling import SCALED
from paceline.optim.settings import CYCLES, OPTIMIZERS_OF_SGD, OPTIMIZERS_OF_SVRG, OptimSettings
from paceline.plan.fusion_plan import EIGHT_BIT
from paceline.plan.rehearsal import RehearseSettings
from paceline.precision.settings import PrecisionSettings

RECIPES = Path(__file__).parent / "recipes"
DEVICES = ("auto", "cpu", "cuda")
SWITCHES = ("auto", "on", "off")
LOSSES = ("cross_entropy", "bce")
TRACKERS = ("csv", "tensorboard", "wandb", "mlflow")
# Parameters of Beta distributions: below, shares are 0 or 1; above, all the same.
MIXES = (0.01, 100.0)
# The quickstart's own share, and more than most recipes have; those with more state it themselves.
WARMUP_MAX_SHARE = 0.2
EQUAL_SHARES, PROBED_SHARES = "equal", "probe"
BATCH_NORM_ROWS = ("ranks", "average")
SIGNAL_ACTIONS = ("save", "stop")
COMPILE_MODES = ("auto", "off", "blocks", "model")
# More than any node has cores; torch accepts 2^31 - 1 and then fails to start them.
MOST_THREADS = 4096
Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class RunSettings:
    """The length, size and place of a run, and what it writes."""

    name: str = "run"
    """Name of the run; a recipe sets it to its own name, and run folders are named after it."""
    epochs: int = 90
    """Number of passes over the training data."""
    global_batch_size: int | None = None
    """Samples of one update over all ranks; unset, `batch_size` times the ranks, or 256 where that
    is unset too, less for small data sets."""
    batch_size: int | None = None
    """Samples of one forward and backward pass of one process; unset, the largest equal share of at
    most 256."""
    shares: str = "equal"
    """Parts of the global batch for ranks of different speed: `equal`, `probe` (measured before the
    first step), or a number for each rank, as in `3:3:1`."""
    rebalance: bool = False
    """Decide the shares again at every checkpoint, from the times of the steps."""
    loss: str = "cross_entropy"
    """`cross_entropy`, `bce` (binary cross-entropy, mean over classes), or a function of outputs and
    targets, as in `my_package.losses:focal`."""
    smoothing: float = 0.1
    """Label smoothing; functions of `run.loss` do their own."""
    mixup: float = 0.0
    """Parameter of mixup's Beta distribution; 0 disables it; with `cutmix` also set, each image
    uses one of the two."""
    cutmix: float = 0.0
    """Parameter of CutMix's Beta distribution; 0 disables it."""
    average_epochs: float = 0.0
    """Evaluate and export weights averaged over about this many epochs; 0 disables averaging."""
    seed: int = 0
    """Seed of the initial weights, the sample order, augmentation and dropout."""
    device: str = "auto"
    """Where to compute: `auto` (a GPU if there is one), `cpu` or `cuda`."""
    threads: int = 0
    """CPU threads of each rank; 0 divides the cores of a node among its ranks."""
    channels_last: bool = True
    """Keep weights and activations in NHWC memory format."""
    fused_norm: str = "auto"
    """Fused kernels for batch norm with ReLU, residual sum and pooling: `on`, `off`, or `auto` (on
    a GPU, for models that have them)."""
    compile: str = "auto"
    """torch.compile: `off`, `blocks` (each residual block), `model`, or `auto` (`model` on a GPU
    for models without fused kernels)."""
    cuda_graphs: str = "auto"
    """Capture micro-step and update as CUDA graphs: `on`, `off`, or `auto` (on a GPU)."""
    output: str = ""
    """Run folder; empty, `runs/NAME-NNN`."""
    resume: str = ""
    """`auto`, a run folder or a checkpoint to continue from; empty starts a new run."""
    pretrained: str = ""
    """Weights to start from, with torchvision's or timm's keys (`.pth`, `.pt` or `.safetensors`)."""
    log_interval: int = 10
    """Steps between two log lines where there is no terminal."""
    eval_interval_epochs: int = 1
    """Epochs between two evaluations."""
    target_top1: float | None = None
    """Stop at the first evaluation that reaches this top-1 accuracy, in percent."""
    max_skipped_steps: int = 50
    """End the run as diverged after this many skipped steps in a row."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs `paceline[tensorboard]`)."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that also receive all metrics: `csv` (`metrics.csv`), `tensorboard`, `wandb`,
    `mlflow`; each but `csv` needs the extra of its name."""
    watch: bool = False
    """Serve the live report of this run on the loopback interface while it runs."""
    watch_port: int = 0
    """Port of the live report; 0 finds a free one."""
    eval_details: str = "auto"
    """Keep the accuracy of each class, confusions and the most confident mistakes of the latest
    evaluation: `on`, `off`, or `auto` (up to 20,000 validation images and 1,000 classes)."""
    rank_records: str = "auto"
    """Which ranks record their steps: `on`, every rank in a file of its own (`metrics.rank1.jsonl` …);
    `off`, rank 0 alone, with the spread of all ranks' times; `auto`, `on` for up to 8 ranks and with
    `run.trace`, else `off`, but every rank writes its latest 1,000 events after an error or a signal to
    save. Notes and corrupt samples are always written."""
    noise_scale: bool = False
    """Estimate the gradient noise scale from the gradients of ranks and micro-batches; needs at least two
    micro-batches per step."""
    trace: bool = False
    """Write `trace.json` into the run folder, for Perfetto."""
    trace_steps: tuple[int, int] = (10, 30)
    """First and last step of the trace."""

    def __post_init__(self) -> None:
        for name in ("epochs", "log_interval", "eval_interval_epochs", "max_skipped_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name}", getattr(self, name), "must be at least 1")
        if self.rank_records not in ("auto", "on", "off"):
            raise ConfigError(
                "run.rank_records", self.rank_records, "must be 'auto', 'on' or 'off'"
            )
        for name in ("global_batch_size", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"run.{name}", value, "must be at least 1")
        self._check_shares()
        if ":" in self.loss:
            split_name("run.loss", self.loss)
        elif self.loss not in LOSSES:
            remedy = f"{nearest(self.loss, LOSSES)} (a function is written my_module:my_loss)"
            raise ConfigError("run.loss", self.loss, "unknown", remedy)
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
        for tracker in self.trackers:
            if tracker not in TRACKERS:
                raise ConfigError("run.trackers", tracker, "unknown", nearest(tracker, TRACKERS))
        if not 0 <= self.watch_port < 65536:
            raise ConfigError("run.watch_port", self.watch_port, "must be 0 to 65535")
        for name, known in (
            ("device", DEVICES),
            ("eval_details", SWITCHES),
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

    def _check_shares(self) -> None:
        if self.shares in (EQUAL_SHARES, PROBED_SHARES):
            if self.rebalance and self.shares == EQUAL_SHARES:
                raise ConfigError(
                    "run.rebalance",
                    True,
                    "but run.shares = 'equal' fixes them",
                    "use run.shares='probe'",
                )
            return
        try:
            parts = [float(part) for part in self.shares.split(":")]
        except ValueError:
            parts = []
        if len(parts) < 2 or not all(0 < part < 1e9 for part in parts):
            raise ConfigError(
                "run.shares", self.shares, "must be 'equal', 'probe', or a number for each rank",
                "try 'probe', or 3:3:1 for three ranks",
            )  # fmt: skip


@dataclass(frozen=True)
class CheckpointSettings:
    """When to save and what to keep; a signal and the end of a run always save."""

    interval_epochs: int = 1
    """Epochs between two checkpoints; 0 disables this interval."""
    interval_steps: int = 0
    """Steps between two checkpoints; 0 disables this interval."""
    keep: int = 2
    """Number of recent checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best top-1 accuracy, as `best.pt`."""
    batch_norm: str = "ranks"
    """Batch-norm statistics in a checkpoint: of all `ranks`, one row each, or their `average`. With
    `average` every rank also goes on with the average after a save, so that resuming stays
    bit-identical; evaluations then depend on when the run saves."""
    background: bool = True
    """Write checkpoints on a thread: steps wait only for the copy to host memory."""
    on_sigusr1: str = "save"
    """Action on SIGUSR1: `save` and continue, or `stop` after saving."""
    on_sigusr2: str = "stop"
    """Action on SIGUSR2: `save` and continue, or `stop` after saving."""
    salvage: bool = True
    """After the loss of a rank, let the lowest surviving rank save its last completed step."""
    accept_salvaged: bool = True
    """Allow `--resume auto` to use such a salvaged checkpoint."""

    def __post_init__(self) -> None:
        for name in ("interval_epochs", "interval_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"checkpoint.{name}", getattr(self, name), "must be 0 or more")
        if self.keep < 1:
            raise ConfigError("checkpoint.keep", self.keep, "must be at least 1")
        if self.batch_norm not in BATCH_NORM_ROWS:
            raise ConfigError(
                "checkpoint.batch_norm", self.batch_norm, "unknown",
                nearest(self.batch_norm, BATCH_NORM_ROWS),
            )  # fmt: skip
        for name in ("on_sigusr1", "on_sigusr2"):
            value = getattr(self, name)
            if value not in SIGNAL_ACTIONS:
                raise ConfigError(
                    f"checkpoint.{name}", value, "unknown", nearest(value, SIGNAL_ACTIONS)
                )


# Settings that need the update of all ranks' mean gradient on every rank, and the value that is off.
_OF_WHOLE_UPDATES = (
    ("run.average_epochs", 0.0), ("run.noise_scale", False), ("optim.schedule_free", 0.0),
    ("model.norm_group", 1),
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """One section for each package that has settings."""

    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    comm: CommSettings = field(default_factory=CommSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    rehearse: RehearseSettings = field(default_factory=RehearseSettings)

    def __post_init__(self) -> None:
        """Settings of two sections that exclude one another."""
        if self.comm.mode == "asynchronous":
            self._exclude("comm.mode = 'asynchronous' leaves no rank a whole update", (
                *_OF_WHOLE_UPDATES, ("optim.clip_norm", 0.0),
                ("optim.trust_log_interval", 0), ("optim.batch_schedule", ""),
                ("run.shares", EQUAL_SHARES), ("precision.loss_scale", None),
            ))  # fmt: skip
            if self.optim.schedule in CYCLES and self.optim.cycle_momentum:
                raise ConfigError(
                    "optim.cycle_momentum", list(self.optim.cycle_momentum),
                    "but with comm.mode = 'asynchronous' the servers' momentum is constant", "use []",
                )  # fmt: skip
            if self.optim.is_class or self.optim.name == "rmsprop_warmup":
                why = (
                    "servers cannot send the state of a class of another module"
                    if self.optim.is_class
                    else "servers do not know the epoch, by which its shares of SGD and RMSprop change"
                )
                raise ConfigError(
                    "optim.name", self.optim.name, f"but with comm.mode = 'asynchronous' {why}",
                    "use another optimizer, such as 'sgd'",
                )  # fmt: skip
        if self.comm.hook == "post_local_sgd":
            self._exclude("comm.hook = 'post_local_sgd' gives each rank weights of its own", (
                *_OF_WHOLE_UPDATES, ("run.shares", EQUAL_SHARES),
            ))  # fmt: skip
        if self.comm.hook != "none":
            self._exclude(f"comm.hook = {self.comm.hook!r} does not sum gradients exactly", (
                ("run.noise_scale", False),
            ))  # fmt: skip
        if self.comm.wire in EIGHT_BIT:
            self._exclude(f"comm.wire = {self.comm.wire!r} adds noise of its own", (
                ("run.noise_scale", False),
            ))  # fmt: skip
        if self.run.shares != EQUAL_SHARES:
            self._exclude("run.shares divides a constant batch among ranks of their own", (
                ("optim.batch_schedule", ""), ("model.norm_group", 1), ("run.noise_scale", False),
            ))  # fmt: skip
        if self.rehearse.ranks:
            self._exclude("a rehearsal adds up the gradients of equal ranks, step by step", (
                ("comm.mode", CommSettings.mode), ("comm.hook", CommSettings.hook),
                ("run.shares", EQUAL_SHARES), ("model.norm_group", 1), ("optim.batch_schedule", ""),
                ("run.trace", False),
            ))  # fmt: skip
            if self.comm.wire in EIGHT_BIT:
                raise ConfigError(
                    "comm.wire", self.comm.wire, "cannot be rehearsed: ranks keep errors of their own",
                    "use 'auto'",
                )  # fmt: skip
            if self.optim.name in OPTIMIZERS_OF_SVRG:
                raise ConfigError(
                    "optim.name", self.optim.name, "cannot be rehearsed: it passes over all samples",
                    "use another optimizer",
                )  # fmt: skip
        alone = self.comm.mode == "asynchronous" or self.comm.hook == "post_local_sgd"
        if alone and self.optim.share_products == "on":
            raise ConfigError(
                "optim.share_products", "on", "but ranks have gradients of their own", "use 'auto'"
            )
        anchored = self.optim.name in OPTIMIZERS_OF_SVRG
        if anchored and (self.comm.mode == "asynchronous" or self.comm.hook != "none"):
            field = "comm.hook" if self.comm.hook != "none" else "comm.mode"
            raise ConfigError(
                field, getattr(self.comm, field.partition(".")[2]),
                f"but {self.optim.name} needs exact gradients of all ranks", "leave one of the two out",
            )  # fmt: skip

    def _exclude(self, reason: str, settings: Iterable[tuple[str, Any]]) -> None:
        """Raises ConfigError for a setting that has not the value beside it."""
        for name, off in settings:
            section, _, key = name.partition(".")
            value = getattr(getattr(self, section), key)
            if value != off:
                remedy = f"use {off!r}" if off else "leave it out"
                raise ConfigError(name, value, f"but {reason}", remedy)

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
    "rehearse": RehearseSettings,
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
        raise ConfigError("recipe", name, f"is not TOML: {error}", "fix that line") from None
    tables.setdefault("run", {})
    if isinstance(tables["run"], dict):
        tables["run"].setdefault("name", path.stem)
    return tables


def load_config(recipe: str | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Defaults < recipe < overrides (`{"section.key": value}`)."""
    tables = read_recipe(recipe) if recipe else {}
    RunConfig.from_tables(tables)  # a mistake in the recipe is reported before one in a flag
    merged = merge(_without_rates(tables, overrides.get("optim.name")), unflatten(overrides))
    if merged.get("optim", {}).get("scaling") == "auto":
        _add_scaling_facts(tables, overrides, merged["optim"])
    merged.setdefault("optim", {}).setdefault(
        "warmup_max_share", _warmup_share(tables, "optim.warmup_epochs" in overrides)
    )
    return RunConfig.from_tables(merged)


def _add_scaling_facts(recipe: Tables, overrides: Mapping[str, Any], optim: dict[str, Any]) -> None:
    """What the rule of `optim.scaling` needs to know of where a value came from."""
    batch = recipe.get("run", {}).get("global_batch_size")
    if batch is not None:
        optim.setdefault("known_good_batch", batch)
    if recipe:
        name = recipe.get("optim", {}).get("name", OptimSettings.name)
        optim.setdefault("known_good_optimizer", name)
        own = from_table(OptimSettings, "optim", recipe.get("optim", {}))
        known = optim.get("known_good_batch")
        if "optim.lr" in overrides and isinstance(known, int) and known > 0:
            optim.setdefault("known_good_lr", own.peak_lr(known))
        if "optim.momentum" in overrides:
            optim.setdefault("known_good_momentum", own.momentum)
    optim.setdefault("scaling_keeps", [name for name in SCALED if name in overrides])


def _without_rates(recipe: Tables, optimizer: object) -> Tables:
    """A recipe's rates are those of SGD, LARS or Muon: Adam's are some hundred times smaller."""
    own = recipe.get("optim", {}).get("name", OptimSettings.name)
    if optimizer is None or optimizer == own or optimizer in OPTIMIZERS_OF_SGD:
        return recipe
    kept = {k: v for k, v in recipe.get("optim", {}).items() if k not in ("lr", "lr_base")}
    return {**recipe, "optim": kept}


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
    """Lays the sections of `above` over those of `below`, key by key. Settings of `below` that belong to
    another one that `above` changes follow it, unless `above` sets them too."""
    merged = {section: dict(table) for section, table in below.items()}
    for section, table in above.items():
        merged.setdefault(section, {}).update(table)
    lower, upper = below.get("data"), above.get("data")
    if isinstance(lower, Mapping) and isinstance(upper, Mapping):
        _follow_image(lower, upper, merged["data"])
    return merged


def _follow_image(
    below: Mapping[str, Any], above: Mapping[str, Any], merged: dict[str, Any]
) -> None:
    """The validation resize keeps its ratio to the image size; statistics that are not those of the
    number of channels give way to its defaults."""
    was = below.get("image_size", DataSettings.image_size)
    size, resize = above.get("image_size", was), below.get("eval_resize", 0)
    numbers = all(type(value) is int and value > 0 for value in (was, size, resize))
    if numbers and size != was and "eval_resize" not in above:
        merged["eval_resize"] = round(size * resize / was)
    if above.get("channels") not in (None, below.get("channels", DataSettings.channels)):
        for name in ("mean", "std"):
            values = below.get(name)
            if name not in above and isinstance(values, list | tuple) and len(values) > 1:
                del merged[name]


def changed_settings(config: RunConfig) -> list[str]:
    """Names of the settings that differ from their defaults; those that are unset do not count."""
    usual = RunConfig().flat()
    return sorted(name for name, value in config.flat().items() if usual.get(name) != value)


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
