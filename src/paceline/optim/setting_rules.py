"""Which values the section `[optim]` may have: names of optimizers and schedules, ranges of numbers, and
settings that exclude one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, nearest
from paceline.core.imports import check_module, split_name
from paceline.core.settings import SettingChecks
from paceline.optim.batch_growth import BATCH_RATES

if TYPE_CHECKING:
    from paceline.optim.settings import OptimSettings

# SVRG and its relatives in low precision; the first three need gradients at an anchor.
ANCHORED = ("halp", "lp_svrg", "svrg")
OPTIMIZERS_OF_SVRG = (*ANCHORED, "lp_sgd")
OPTIMIZERS_OF_SGD = ("lars", "muon", "rmsprop_warmup", "sgd", "soap", *OPTIMIZERS_OF_SVRG)
ORTHOGONAL_OPTIMIZERS = ("muon", "soap")
SOAP_BETA2 = 0.95
# Those without Triton kernels and without a form in half precision.
WITHOUT_KERNELS = ("rmsprop_warmup", *OPTIMIZERS_OF_SVRG)
OPTIMIZERS = ("adamw", "lamb", *OPTIMIZERS_OF_SGD)
# Peak rates at a batch of 256 where `lr_base` is not set: DeiT's, and that of "ResNet strikes back".
ADAM_LR_BASES = {"adamw": 2.5e-4, "lamb": 6.25e-4}
PATHS = ("auto", "foreach", "triton")
ORTHOGONALS = ("filters", "all")
SCALINGS = ("off", "auto")
SHARES = ("auto", "on", "off")
PRODUCTS = ("auto", "kernels", "torch")
CYCLES = ("one_cycle", "triangular")
SCHEDULES = ("constant", "cosine", "piecewise", "poly", "range", "step", *CYCLES)


def check_optim(optim: OptimSettings) -> None:
    """Raises ConfigError for the first value that cannot be."""
    check = SettingChecks("optim", optim)
    if optim.is_class:
        split_name("optim.name", optim.name)
    elif optim.name not in OPTIMIZERS:
        remedy = f"{nearest(optim.name, OPTIMIZERS)} (a class is written torch.optim:RAdam)"
        raise check.error("name", "unknown", remedy)
    check.known("schedule", SCHEDULES)
    check.number("lr", "above 0", "0.1 is a common start")
    check.number("lr_base", "above 0", "try 0.1")
    check.number("lr_base_batch", "at least 1")
    check.number("momentum", "in [0, 1)", "try 0.9")
    if optim.nesterov and optim.momentum == 0:
        raise check.error("nesterov", "needs momentum", "set optim.momentum = 0.9")
    for name in (
        "weight_decay", "warmup_epochs", "warmup_start", "lr_end", "poly_power", "eps",
        "trust_log_interval", "clip_norm", "adam_eps", "rms_rate", "rms_center_epochs", "lp_span",
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
    for name in ("beta1", "beta2", "rms_beta"):
        check.number(name, "in [0, 1)")
    check.number("layer_decay", "in (0, 1]", "try 0.75, or 1 (off)")
    check.number("schedule_free", "in [0, 1)", "try 0.9")
    if optim.schedule_free and (optim.schedule != "constant" or optim.in_half):
        raise check.error(
            "in_half" if optim.in_half else "schedule", "does not go with optim.schedule_free",
            "use optim.schedule = 'constant' and master weights",
        )  # fmt: skip
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
    if optim.scaling == "auto" and optim.batch_schedule:
        raise check.error(
            "batch_schedule", "does not go with optim.scaling = 'auto', whose rule is for one batch",
            "leave one of them out",
        )  # fmt: skip


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
    check.number("cycle_floor", "in [0, 1]", "try 0.1")
    check.number("cycle_tail", "in [0, 1)", "try 0.1")
    check.number("cycle_decay", "in (0, 1]", "try 0.5")
    check.number("cycle_epochs", "above 0", "try 8")
    momenta = list(optim.cycle_momentum)
    if momenta and not (len(momenta) == 2 and 0 <= momenta[0] <= momenta[1] < 1):
        raise ConfigError(
            "optim.cycle_momentum", momenta, "must be a lower and a higher value in [0, 1)",
            "try [0.85, 0.95], or [] to keep optim.momentum",
        )  # fmt: skip
    if optim.schedule in CYCLES and momenta and optim.is_class:
        raise ConfigError(
            "optim.cycle_momentum", momenta, f"{optim.name} keeps its own momentum", "set it to []"
        )
    low, high = optim.range_lr
    if not 0 < low < high < float("inf"):
        raise ConfigError(
            "optim.range_lr", [low, high], "must be a lower and a higher rate above 0",
            "try [1e-5, 10.0]",
        )  # fmt: skip
    check.number("range_steps", "at least 2")


def _check_batches(optim: OptimSettings, check: SettingChecks) -> None:
    check.known("batch_rate", BATCH_RATES)
    growth = optim.batch_growth
    if optim.batch_limit is not None and (growth.factor == 1 or optim.batch_limit < 1):
        raise check.error(
            "batch_limit", "is the limit of a rule such as 'x4'",
            "leave it out, or set optim.batch_schedule = 'x4'",
        )  # fmt: skip
    if growth.factor > 1 and len(set(optim.decay_epochs)) < len(optim.decay_epochs):
        raise ConfigError(
            "optim.decay_epochs", list(optim.decay_epochs),
            f"has an epoch twice, but optim.batch_schedule = {optim.batch_schedule!r} grows the batch "
            "at each", "give each once",
        )  # fmt: skip
    if growth.factor > 1 and optim.schedule != "step":
        raise check.error(
            "batch_schedule",
            f"grows the batch at optim.decay_epochs, which {optim.schedule!r} does not have",
            "use optim.schedule = 'step', or a list as in '0:256,8:1024'",
        )


def _check_svrg(optim: OptimSettings, check: SettingChecks) -> None:
    if optim.bits not in (8, 16):
        raise check.error("bits", "must be 8 or 16", "try 8")
    for name in ("halp_mu", "center_epochs"):
        check.number(name, "above 0")
    if optim.name not in OPTIMIZERS_OF_SVRG:
        return
    for name, wanted in (
        ("momentum", 0.0), ("nesterov", False), ("clip_norm", 0.0), ("batch_schedule", ""),
        ("schedule_free", 0.0), ("scaling", "off"),
    ):  # fmt: skip
        if getattr(optim, name) != wanted:
            raise check.error(
                name, f"{optim.name} is not defined with it", f"set optim.{name} = {wanted!r}"
            )
    if optim.schedule in CYCLES and optim.cycle_momentum:
        raise ConfigError(
            "optim.cycle_momentum", list(optim.cycle_momentum),
            f"{optim.name} is not defined with momentum", "set it to []",
        )  # fmt: skip


def _check_lars(optim: OptimSettings, check: SettingChecks) -> None:
    if optim.trust_log_interval and optim.name not in ("lamb", "lars", "muon", "soap"):
        raise check.error(
            "trust_log_interval",
            f"{optim.name} has no trust ratios",
            "use optim.name = 'lars', or 0",
        )
    check.number("trust_coefficient", "above 0", "try 0.001")
    check.known("fused", PATHS)
    if optim.in_half and optim.fused == "triton":
        raise check.error("fused", "has no kernels for optim.in_half", "use foreach")


def _check_muon(optim: OptimSettings, check: SettingChecks) -> None:
    check.known("orthogonal", ORTHOGONALS)
    check.known("share_products", SHARES)
    check.known("muon_products", PRODUCTS)
    check.number("soap_interval", "at least 1")
    if optim.name not in ORTHOGONAL_OPTIMIZERS:
        remedy = "use optim.name = 'muon', or leave it out"
        if optim.share_products == "on":
            raise check.error("share_products", f"{optim.name} has no products to share", remedy)
        if optim.orthogonal != "filters":
            raise check.error("orthogonal", f"{optim.name} makes nothing orthogonal", remedy)
        return
    for name, wanted in (("clip", False), ("lr_in_momentum", True), ("in_half", False)):
        if getattr(optim, name) != wanted:
            raise check.error(
                name, f"{optim.name} has no such form", "leave it out, or use optim.name = 'lars'"
            )


def _check_others(optim: OptimSettings, check: SettingChecks) -> None:
    if optim.arguments_table() and not optim.is_class:
        raise check.error(
            "arguments", f"{optim.name} takes none", "it is for optim.name = 'module:Class'"
        )
    if optim.name in WITHOUT_KERNELS and optim.fused == "triton":
        raise check.error("fused", f"there are no kernels for {optim.name}", "use 'auto'")
    if optim.in_half and (optim.name in WITHOUT_KERNELS or optim.name not in OPTIMIZERS_OF_SGD):
        raise check.error("in_half", f"{optim.name} has no such form", "use optim.name = 'lars'")
    if optim.is_class and optim.lr is None and optim.has_default_base:
        check_module("optim.name", optim.name)
        raise check.error(
            "lr", f"no learning rate, and there is no default for {optim.name}",
            "give --lr, such as 0.001",
        )  # fmt: skip
    if optim.is_class and optim.fused == "triton":
        raise check.error("fused", f"there are no kernels for {optim.name}", "use 'auto'")
