"""Settings that existed in earlier versions under a name that they do not have any more.

`REMOVED` has the value that each always has now and what to do instead, `RENAMED` the default and the new
name. Configurations, run folders and checkpoints that name one with this value are read as before. Any
other value is refused in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.config.settings import STRATEGIES
from paceline.core.errors import ConfigError
from paceline.core.extensions import load_part, provided

_ARGUMENT = "leave it out; in a loop of your own it is an argument of pl.LARS"
_DEFAULT = "leave it out"

REMOVED: Mapping[str, tuple[Any, str]] = {
    "checkpoint.accept_salvaged": (True, "name another file with --resume FILE"),
    "checkpoint.salvage": (True, "leave it out; delete the file *.salvaged.pt"),
    "comm.hook": (
        "none",
        "leave it out; in a loop of your own, pl.DataParallel has register_comm_hook",
    ),
    "comm.powersgd_rank": (1, _DEFAULT),
    "comm.powersgd_start_step": (100, _DEFAULT),
    "comm.local_steps": (4, _DEFAULT),
    "comm.local_start_step": (100, _DEFAULT),
    "comm.local_group_size": (1, _DEFAULT),
    "optim.range_lr": ([1e-5, 10.0], "use paceline lr-find --from --to"),
    "optim.range_steps": (100, "use paceline lr-find --steps"),
    "data.crop_ratio": ([3 / 4, 4 / 3], _DEFAULT),
    "data.prefetch_batches": (4, _DEFAULT),
    "data.read_retries": (6, _DEFAULT),
    "data.resident_max_mib": (4096, "use data.resident = 'on' or 'off'"),
    "data.shuffle_run": (16, _DEFAULT),
    "model.pool5_norm": (True, _DEFAULT),
    "optim.adapt_bias_norm": (False, _ARGUMENT),
    "optim.cycle_floor": (0.1, _DEFAULT),
    "optim.cycle_tail": (0.1, _DEFAULT),
    "optim.eps": (0.0, _ARGUMENT),
    "optim.in_half": (False, _DEFAULT),
    "optim.known_good_lr": (None, _DEFAULT),
    "optim.known_good_momentum": (None, _DEFAULT),
    "optim.known_good_optimizer": ("", _DEFAULT),
    "optim.lr_in_momentum": (True, _ARGUMENT),
    "optim.lp_span": (0.0, _DEFAULT),
    "optim.muon_products": ("auto", _DEFAULT),
    "optim.rms_beta": (0.99, _DEFAULT),
    "optim.rms_rate": (3e-4, _DEFAULT),
    "optim.scaling_keeps": ([], _DEFAULT),
    "optim.soap_interval": (10, _DEFAULT),
    "optim.trust_log_interval": (0, "leave it out; optimizers have trust_ratios()"),
    "precision.loss_scale": (None, "leave it out; use precision.loss_scale_init for the first one"),
    "precision.loss_scale_interval": (1000, _DEFAULT),
    "precision.loss_scale_max": (2.0**24, _DEFAULT),
    "precision.loss_scale_min": (1.0, _DEFAULT),
    "run.max_skipped_steps": (50, "leave it out; pl.Callback can stop a run earlier"),
    "run.rank_records": ("auto", "leave it out; with --trace every rank records its steps"),
    "run.tensorboard": (False, "use run.trackers = ['tensorboard']"),
    "run.weight_stream": ("off", _DEFAULT),
}


_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
RENAMED: Mapping[str, tuple[Any, str]] = {
    "data.shuffle_window_shards": (16, "data.shuffle"),
    "run.trace": (False, "run.traced_steps"),
    "run.trace_steps": ([10, 30], "run.traced_steps"),
    "run.watch": (False, "run.report_port"),
    "run.watch_port": (0, "run.report_port"),
    "optim.batch_limit": (None, "optim.batch_schedule"),
    "comm.eta_kib": (None, "comm.hybrid.sizes"),
    "comm.hybrid.eta_kib": (None, "comm.hybrid.sizes"),
    "comm.mode": ("synchronous", "run.strategy"),
    "comm.sizes": ("", "comm.hybrid.sizes"),
    "optim.adamw": (_ADAM, "optim.adam"),
    "optim.lamb": (_ADAM | {"clip": False}, "optim.adam"),
    "optim.piecewise": (
        {"epochs": [30.0, 60.0, 80.0], "factors": [0.5, 0.075, 0.01, 0.001]}, "optim.step",
    ),
    "optim.adam_eps": (1e-8, "optim.adam.eps"),
    "optim.beta1": (0.9, "optim.adam.beta1"),
    "optim.beta2": (0.999, "optim.adam.beta2"),
    "optim.clip": (False, "optim.lars.clip or optim.adam.clip"),
    "optim.muon_steps": ("relative", "optim.muon.steps"),
    "optim.orthogonal": ("filters", "optim.muon.orthogonal"),
    "optim.share_products": ("auto", "optim.muon.share_products"),
    "optim.trust_coefficient": (
        0.001,
        "optim.lars.trust_coefficient or optim.muon.trust_coefficient",
    ),
    "optim.decay_epochs": ([30.0, 60.0, 80.0], "optim.step.epochs"),
    "optim.decay_factors": ([0.5, 0.075, 0.01, 0.001], "optim.step.factors"),
    "optim.decay_rate": (0.1, "optim.step.factor"),
    "optim.poly_power": (2.0, "optim.poly.power"),
}  # fmt: skip


def without_removed(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections without earlier settings that have the value that applies now."""
    kept: dict[str, Any] = {}
    for section, table in tables.items():
        rest = _rest(section, table)
        if rest or not table:  # a section of which nothing is left may have been removed as a whole
            kept[section] = rest
    return kept


def refuse_removed(tables: Mapping[str, Any]) -> None:
    """Raises ConfigError for an earlier setting that has another value than the one that applies now."""
    for name, value in _named("", without_removed(tables)):
        if (renamed := _renamed(name)) is not None:
            new = renamed[1]
            raise ConfigError(name, value, f"is called {new} now", f"write {new}{_choice(new)}")
        if name in REMOVED:
            usual, remedy = REMOVED[name]
            problem = f"is no longer a setting; it is always {usual!r}"
            raise ConfigError(name, value, problem, remedy)


def _rest(name: str, value: Any) -> Any:
    """A table without what has its usual value; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    names = {key: f"{name}.{key}" for key in value}
    kept = {k: (v, _rest(names[k], v)) for k, v in value.items() if not _is_usual(names[k], v)}
    # A table of which nothing is left may have been removed as a whole, and its owner with it.
    return {k: rest for k, (own, rest) in kept.items() if rest != {} or own == {}}


def _named(prefix: str, tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields all settings and tables by their names, outer ones first."""
    for key, value in tables.items():
        yield prefix + key, value
        if isinstance(value, Mapping):
            yield from _named(f"{prefix}{key}.", value)


def _choice(name: str) -> str:
    """Returns what else a setting of a strategy needs."""
    section, owner, *_ = name.split(".")
    named = section == "run" and owner in STRATEGIES
    return f" and set run.strategy = {owner!r}" if named else ""


def _is_usual(name: str, value: Any) -> bool:
    earlier = REMOVED.get(name) or _renamed(name)
    return earlier is not None and bool(value == earlier[0])


def _renamed(name: str) -> tuple[Any, str] | None:
    """Default and new name; those of an extension's settings are in the extension."""
    if name in RENAMED or (place := provided("renamed settings").get(name)) is None:
        return RENAMED.get(name)
    found: tuple[Any, str] = load_part(place, name, None)[name]
    return found
