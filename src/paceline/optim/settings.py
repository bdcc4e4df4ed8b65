"""Settings of the optimizer and its schedule, the section `[optim]` of a recipe: names of optimizers and
schedules, ranges of numbers, and combinations that are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.core.errors import ConfigError, nearest
from paceline.core.exclusions import Exclusion, check_exclusions, not_in, one_of
from paceline.core.imports import check_module, split_name
from paceline.core.settings import Section, SettingChecks, parse_arguments
from paceline.optim.batch_growth import BATCH_RATES, BatchGrowth
from paceline.optim.registry import optimizer_names, registered_rule

# SVRG and its relatives in low precision; the first three need gradients at an anchor.
ANCHORED = ("halp", "lp_svrg", "svrg")
OPTIMIZERS_OF_SVRG = (*ANCHORED, "lp_sgd")
OPTIMIZERS_OF_SGD = ("lars", "muon", "rmsprop_warmup", "sgd", *OPTIMIZERS_OF_SVRG)
# Those without Triton kernels.
WITHOUT_KERNELS = ("rmsprop_warmup", *OPTIMIZERS_OF_SVRG)
# Peak rates at a batch of 256 where `lr_base` is not set: DeiT's, and that of "ResNet strikes back".
ADAM_LR_BASES = {"adamw": 2.5e-4, "lamb": 6.25e-4}
PATHS = ("auto", "foreach", "triton")
ORTHOGONALS = ("filters", "all", "auto")
SCALINGS = ("off", "auto")
SHARES = ("auto", "on", "off")
STEPS = ("relative", "fixed", "auto")
CYCLES = ("one_cycle", "triangular")
SCHEDULES = ("constant", "cosine", "piecewise", "poly", "range", "step", *CYCLES)
# Settings that only some optimizers, or schedules, read.
_OF_OPTIMIZERS = {
    "momentum": OPTIMIZERS_OF_SGD, "nesterov": ("lars", "muon", "sgd"),
    "beta1": ("adamw", "lamb"), "beta2": ("adamw", "lamb"),
    "adam_eps": ("adamw", "lamb", "rmsprop_warmup"), "bits": ("halp", "lp_svrg", "lp_sgd"),
    "halp_mu": ("halp",), "center_epochs": ANCHORED,
    "trust_coefficient": ("lars", "muon"), "adapt_bias_norm": ("lamb", "lars", "muon"),
    "clip": ("lars", "lamb"), "orthogonal": ("muon",), "muon_steps": ("muon",),
    **dict.fromkeys(("rms_center_epochs", "rms_width_epochs"),
                    ("rmsprop_warmup",)),
}  # fmt: skip
_OF_SCHEDULES = {
    "decay_epochs": ("step", "piecewise"), "decay_factors": ("piecewise",), "decay_rate": ("step",),
    "poly_power": ("poly",), "lr_end": ("cosine", "poly", "one_cycle"),
    "decay_over_epochs": ("cosine", "poly"), "cycle_momentum": CYCLES,
    "cycle_epochs": ("triangular",), "cycle_decay": ("triangular",),
    "range_lr": ("range",), "range_steps": ("range",),
}  # fmt: skip


@dataclass(frozen=True)
class OptimSettings(Section):
    """The update rule and the learning-rate schedule; docs/optimizers.md has the equations."""

    NAME: ClassVar[str] = "optim"
    CHOOSERS: ClassVar[tuple[str, ...]] = ("name", "schedule")

    name: str = "sgd"
    """`sgd`, `lars`, `muon`, `adamw`, `lamb`, `rmsprop_warmup`, `svrg`, `halp`, `lp_svrg`,
    `lp_sgd`, a class of torch.optim or of another module, as in `torch.optim:RAdam`, or a registered
    name."""
    arguments: str = ""
    """Keyword arguments for the class of `module:Class` or for a registered rule beside the rate, as a
    TOML table: `{betas = [0.9, 0.95]}`."""
    lr: float | None = None
    """Peak learning rate; unset, `lr_base` · global batch / `lr_base_batch` (linear scaling)."""
    lr_base: float = 0.1
    """Peak learning rate at a global batch of `lr_base_batch`; the default stands for 0.00025 with
    `adamw` and 0.000625 with `lamb`."""
    lr_base_batch: int = 256
    """Global batch that `lr_base` refers to."""
    scaling: str = "off"
    """`auto` derives optimizer, rate, trust coefficient, warm-up, batch-norm group, averaging and, at
    few steps per epoch, growth of the batch, from a recipe that works at `known_good_batch`; `off`
    uses the settings as they are."""
    known_good_batch: int | None = None
    """Global batch at which the recipe is known to work, for `scaling`; unset, the recipe's own
    `run.global_batch_size`."""
    known_good_optimizer: str = ""
    """Optimizer of the recipe at that batch; empty, `name`; filled in from the recipe."""
    known_good_lr: float | None = None
    """Peak learning rate of the recipe at that batch; unset, that of these settings; filled in from the
    recipe where the command line gives another `lr`."""
    known_good_momentum: float | None = None
    """Momentum of the recipe; filled in from it where the command line gives another `momentum`."""
    scaling_keeps: tuple[str, ...] = ()
    """Settings that `scaling` leaves as they are; filled in with those given on the command line."""
    momentum: float = 0.9
    """Momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    beta1: float = 0.9
    """AdamW and LAMB: decay of the average of gradients."""
    beta2: float = 0.999
    """AdamW and LAMB: decay of the average of squared gradients."""
    adam_eps: float = 1e-8
    """AdamW, LAMB and `rmsprop_warmup`: added to the root of the average of squares."""
    bits: int = 8
    """`halp`, `lp_svrg` and `lp_sgd`: bits of the integers that hold the offset or the weights, 8 or
    16."""
    halp_mu: float = 0.1
    """`halp`: assumed strong convexity μ; the offset reaches ‖full gradient‖ / μ."""
    center_epochs: float = 1.0
    """`svrg`, `halp` and `lp_svrg`: epochs from one full gradient to the next."""
    rms_center_epochs: float = 10.0
    """`rmsprop_warmup`: epoch at which SGD and RMSprop have equal shares."""
    rms_width_epochs: float = 5.0
    """`rmsprop_warmup`: width of the transition in epochs; it is over half of it after
    `rms_center_epochs`."""
    clip_norm: float = 0.0
    """Largest norm of all gradients together; larger ones are scaled down to it; 0 clips nothing."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the one before it; 1 gives all layers the same."""
    weight_decay: float = 1e-4
    """Weight decay of weights; biases and normalization have none unless `decay_bias_norm`."""
    decay_bias_norm: bool = False
    """Apply weight decay to biases and normalization parameters too."""
    warmup_epochs: float = 5.0
    """Epochs of linear warm-up."""
    warmup_start: float = 0.0
    """Learning rate at the start of warm-up."""
    warmup_max_share: float = 1.0
    """Largest share of the run that warm-up may take; the command line sets 0.2, or the share in
    the recipe if larger, and 1 if `--warmup-epochs` is given."""
    schedule: str = "cosine"
    """Decay after warm-up: `constant`, `cosine`, `poly`, `step` or `piecewise`; `one_cycle` and
    `triangular` rise by themselves and have no warm-up; `range` is that of `paceline lr-find`."""
    schedule_free: float = 0.0
    """Schedule-free training: share of the average in the weights at which gradients are taken; 0 is off,
    0.9 common; needs `schedule = "constant"`."""
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which `step` multiplies the rate by `decay_rate`, and `piecewise` takes the next of
    `decay_factors`."""
    decay_factors: tuple[float, ...] = (0.5, 0.075, 0.01, 0.001)
    """`piecewise`: shares of the peak rate, before the first of `decay_epochs` and from each of
    them on."""
    cycle_momentum: tuple[float, ...] = (0.85, 0.95)
    """`one_cycle` and `triangular`: momentum (β₁ of AdamW and LAMB) at the highest and at the lowest
    rate of a cycle; an empty list keeps `momentum`."""
    cycle_epochs: float = 8.0
    """`triangular`: epochs of one cycle, up and down."""
    cycle_decay: float = 1.0
    """`triangular`: factor of a cycle's height to the next one's; 0.5 is Smith's `triangular2`."""
    range_lr: tuple[float, float] = (1e-5, 10.0)
    """`range`: first and last rate; it grows by the same factor with every step."""
    range_steps: int = 100
    """`range`: steps from the first rate to the last."""
    decay_rate: float = 0.1
    """Factor of each decay of `step`."""
    poly_power: float = 2.0
    """Exponent of `poly`."""
    lr_end: float = 0.0
    """Final learning rate of `cosine`, `poly` and `one_cycle`."""
    decay_over_epochs: float | None = None
    """Epoch at which `cosine` and `poly` reach `lr_end`, warm-up included; unset, the end of the
    run."""
    batch_schedule: str = ""
    """Global batches by epoch, as in `0:256,8:1024,12:4096`, or `x4`: four times the batch at each of
    `decay_epochs`; empty keeps the batch."""
    batch_limit: int | None = None
    """Largest global batch that a rule such as `x4` reaches; from then on the rate decays alone."""
    batch_rate: str = "auto"
    """How the rate follows the batch of `batch_schedule`: `constant` (not at all), `linear` (times batch
    / first batch), `sqrt`, or `auto` (`linear` with a rule such as `x4`, else `constant`)."""
    trust_coefficient: float = 0.001
    """Trust coefficient η of LARS and Muon; LAMB has none."""
    clip: bool = False
    """LARS and LAMB: limit the local learning rate to the global one, as in LARC."""
    adapt_bias_norm: bool = False
    """Apply the trust ratio to biases and normalization parameters too."""
    orthogonal: str = "filters"
    """Muon: layers with orthogonalized momentum, `filters` (convolutions), `all` (linear layers too) or
    `auto` (`all` where hidden linear layers have more weights than convolutions)."""
    muon_steps: str = "relative"
    """Muon: length of a step of an orthogonalized matrix, `relative` to its norm, `fixed`
    (relative to the norm with which it begins), or `auto` (`fixed` in nets with fewer norm layers than
    such matrices, the last linear layer aside; shorter where many have none)."""
    share_products: str = "auto"
    """Muon: ranks share the matrix products out, each computes its part and all get the
    results: `on`, `off`, or `auto` (with several ranks, unless they share a GPU or use Gloo on GPUs)."""
    fused: str = "auto"
    """Implementation of the update: `triton`, `foreach`, or `auto` (Triton on a GPU where it is
    installed)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self)
        check_exclusions((*EXCLUSIONS, *self.exclusions()), optim=self)

    @property
    def is_class(self) -> bool:
        """Whether `name` is `module:Class`."""
        return _is_class(self.name)

    @property
    def is_foreign(self) -> bool:
        """Returns True if the optimizer is not one of Paceline's own."""
        return self.is_class or registered_rule(self.name) is not None

    @property
    def has_default_base(self) -> bool:
        """Whether `lr_base` is as it is where nobody sets it."""
        return self.lr_base == OptimSettings.lr_base

    @property
    def batch_growth(self) -> BatchGrowth:
        """`batch_schedule`, read."""
        return BatchGrowth.parse(self.batch_schedule)

    @property
    def idle(self) -> dict[str, str]:
        """Settings that are given but have no effect, and why: those of another optimizer or schedule.
        They are not refused, because a recipe has them and the command line chooses another."""
        if self.scaling != "off" or self.schedule == "range":  # these choose what a recipe has
            return {}
        usual, found = OptimSettings(), {}
        for names, chosen, what in (
            (_OF_OPTIMIZERS, self.name, "name"),
            (_OF_SCHEDULES, self.schedule, "schedule"),
        ):
            for name, users in names.items():
                if chosen not in users and getattr(self, name) != getattr(usual, name):
                    found[name] = f"optim.{what} = {chosen!r}"
        if self.batch_rate != usual.batch_rate and not self.batch_schedule:
            found["batch_rate"] = "no optim.batch_schedule"
        return found

    def arguments_table(self) -> dict[str, Any]:
        """`arguments` as a dictionary."""
        table = parse_arguments("optim.arguments", self.arguments)
        return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}

    def peak_lr(self, global_batch: int) -> float:
        """Linear scaling (Goyal et al. 2017), unless the rate is given as it is."""
        if self.lr is not None:
            return self.lr
        base = self.lr_base
        if self.has_default_base:
            base = ADAM_LR_BASES.get(self.name, base)
        return base * global_batch / self.lr_base_batch


def check_optim(optim: OptimSettings) -> None:
    """Raises ConfigError for the first value that cannot be."""
    check = SettingChecks("optim", optim)
    if optim.is_class:
        split_name("optim.name", optim.name)
    elif optim.name not in optimizer_names():
        remedy = f"{nearest(optim.name, optimizer_names())} (a class is written torch.optim:RAdam)"
        raise check.error("name", "unknown", remedy)
    check.known("schedule", SCHEDULES)
    check.number("lr", "above 0", "0.1 is a common start")
    check.number("lr_base", "above 0", "try 0.1")
    check.number("lr_base_batch", "at least 1")
    check.number("momentum", "in [0, 1)", "try 0.9")
    for name in (
        "weight_decay", "warmup_epochs", "warmup_start", "lr_end", "poly_power", "clip_norm",
        "adam_eps", "rms_center_epochs",
    ):  # fmt: skip
        check.number(name, "0 or more")
    check.number("warmup_max_share", "in (0, 1]", "try 0.2")
    check.number("decay_rate", "in (0, 1]", "try 0.1")
    if list(optim.decay_epochs) != sorted(optim.decay_epochs):
        raise check.error("decay_epochs", "must rise")
    over = optim.decay_over_epochs
    if over is not None and not optim.warmup_epochs < over < float("inf"):
        raise check.error(
            "decay_over_epochs",
            f"must lie behind the warm-up of {optim.warmup_epochs:g} epochs",
            "leave it unset to decay over the whole run",
        )
    check.number("rms_width_epochs", "above 0", "try 5")
    for name in ("beta1", "beta2"):
        check.number(name, "in [0, 1)")
    check.number("layer_decay", "in (0, 1]", "try 0.75, or 1 (off)")
    check.number("schedule_free", "in [0, 1)", "try 0.9")
    _check_scaling(optim, check)
    _check_schedule(optim, check)
    _check_batches(optim, check)
    _check_svrg(optim, check)
    _check_lars(optim, check)
    _check_muon(optim, check)
    _check_others(optim, check)


def _check_scaling(optim: OptimSettings, check: SettingChecks) -> None:
    check.known("scaling", SCALINGS)
    check.number("known_good_batch", "at least 1")
    check.number("known_good_lr", "above 0", "leave it out")
    check.number("known_good_momentum", "in [0, 1)", "leave it out")


def _check_schedule(optim: OptimSettings, check: SettingChecks) -> None:
    factors, epochs = list(optim.decay_factors), len(optim.decay_epochs)
    if optim.schedule == "piecewise" and len(factors) != epochs + 1:
        raise ConfigError(
            "optim.decay_factors", factors,
            f"{len(factors)} factors for {epochs} optim.decay_epochs",
            f"give {epochs + 1}: one before the first epoch, one from each on",
        )  # fmt: skip
    if any(not 0 <= factor < float("inf") for factor in factors):
        raise ConfigError("optim.decay_factors", factors, "must be 0 or more")
    check.number("cycle_decay", "in (0, 1]", "try 0.5")
    check.number("cycle_epochs", "above 0", "try 8")
    momenta = list(optim.cycle_momentum)
    if momenta and not (len(momenta) == 2 and 0 <= momenta[0] <= momenta[1] < 1):
        raise ConfigError(
            "optim.cycle_momentum", momenta, "must be a lower and a higher value in [0, 1)",
            "try [0.85, 0.95], or [] to keep optim.momentum",
        )  # fmt: skip
    low, high = optim.range_lr
    if not 0 < low < high < float("inf"):
        raise ConfigError(
            "optim.range_lr", [low, high], "must be a lower and a higher rate above 0",
            "try [1e-5, 10.0]",
        )  # fmt: skip
    check.number("range_steps", "at least 2")


def _check_batches(optim: OptimSettings, check: SettingChecks) -> None:
    check.known("batch_rate", BATCH_RATES)
    check.number("batch_limit", "at least 1", "leave it out")


def _check_svrg(optim: OptimSettings, check: SettingChecks) -> None:
    if optim.bits not in (8, 16):
        raise check.error("bits", "must be 8 or 16", "try 8")
    for name in ("halp_mu", "center_epochs"):
        check.number(name, "above 0")


def _check_lars(optim: OptimSettings, check: SettingChecks) -> None:
    check.number("trust_coefficient", "above 0", "try 0.001")
    check.known("fused", PATHS)


def _check_muon(optim: OptimSettings, check: SettingChecks) -> None:
    check.known("orthogonal", ORTHOGONALS)
    check.known("muon_steps", STEPS)
    check.known("share_products", SHARES)


def _check_others(optim: OptimSettings, check: SettingChecks) -> None:
    if optim.arguments_table() and not optim.is_foreign:
        raise check.error(
            "arguments", f"{optim.name} takes none", "it is for optim.name = 'module:Class'"
        )
    if optim.is_foreign and optim.lr is None and optim.has_default_base:
        if optim.is_class:
            check_module("optim.name", optim.name)
        raise check.error(
            "lr", f"no learning rate, and there is no default for {optim.name}",
            "give --lr, such as 0.001",
        )  # fmt: skip


_OF_SVRG = {"optim.name": one_of(*OPTIMIZERS_OF_SVRG)}


def _grows_by_rule(schedule: str) -> bool:
    """Returns True for a rule such as `x4`."""
    return BatchGrowth.parse(schedule).factor > 1


def _is_class(name: str) -> bool:
    return ":" in name


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "optim.nesterov", one_of(True), {"optim.momentum": one_of(0)},
        "needs momentum", "set optim.momentum = 0.9",
    ),
    Exclusion(
        "optim.schedule", not_in("constant"), {"optim.schedule_free": not_in(0)},
        "is not supported with optim.schedule_free", "use optim.schedule = 'constant'",
    ),
    Exclusion(
        "optim.batch_schedule", not_in(""), {"optim.scaling": one_of("auto")},
        "optim.scaling = 'auto' chooses the batches", "leave one of them out",
    ),
    Exclusion(
        "optim.cycle_momentum", not_in(()),
        {"optim.schedule": one_of(*CYCLES), "optim.name": _is_class},
        "{optim.name} keeps its own momentum", "set it to []",
    ),
    Exclusion(
        "optim.batch_limit", not_in(None),
        {"optim.batch_schedule": lambda schedule: not _grows_by_rule(schedule)},
        "is the limit of a rule such as 'x4'",
        "leave it out, or set optim.batch_schedule = 'x4'",
    ),
    Exclusion(
        "optim.decay_epochs", lambda epochs: len(set(epochs)) < len(epochs),
        {"optim.batch_schedule": _grows_by_rule},
        "contains an epoch twice, but optim.batch_schedule = {optim.batch_schedule!r} grows the batch "
        "at each", "give each once",
    ),
    Exclusion(
        "optim.batch_schedule", _grows_by_rule, {"optim.schedule": not_in("step")},
        "grows the batch at optim.decay_epochs, which {optim.schedule!r} does not have",
        "use optim.schedule = 'step', or a list as in '0:256,8:1024'",
    ),
    *(
        Exclusion(
            f"optim.{name}", not_in(wanted), _OF_SVRG, "{optim.name} is not defined with it",
            f"set optim.{name} = {wanted!r}",
        )
        for name, wanted in (
            ("momentum", 0.0), ("nesterov", False), ("clip_norm", 0.0), ("batch_schedule", ""),
            ("schedule_free", 0.0), ("scaling", "off"),
        )
    ),
    Exclusion(
        "optim.cycle_momentum", not_in(()), {**_OF_SVRG, "optim.schedule": one_of(*CYCLES)},
        "{optim.name} is not defined with momentum", "set it to []",
    ),
    Exclusion(
        "optim.share_products", one_of("on"), {"optim.name": not_in("muon")},
        "{optim.name} has no products to share", "use optim.name = 'muon', or leave it out",
    ),
    Exclusion(
        "optim.clip", one_of(True), {"optim.name": one_of("muon")},
        "{optim.name} has no such form", "leave it out, or use optim.name = 'lars'",
    ),
    Exclusion(
        "optim.fused", one_of("triton"),
        {"optim.name": lambda name: name in WITHOUT_KERNELS or _is_class(name)},
        "there are no kernels for {optim.name}", "use 'auto'",
    ),
)  # fmt: skip
