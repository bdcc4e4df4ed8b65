"""`RunConfig`: the settings of all packages, in sections.

Flags override a recipe (shipped, or a TOML file), and a recipe overrides the defaults (`load_config`).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import tomli_w

from paceline.comm.settings import CommSettings
from paceline.config.exclusions import EXCLUSIONS, Job
from paceline.config.recipe import CHOOSERS, Tables, read_recipe
from paceline.config.settings import STRATEGIES, CheckpointSettings, Pending, RunSettings
from paceline.config.trust import check_trust
from paceline.core.errors import ConfigError, nearest
from paceline.core.exclusions import Exclusion, check_exclusions
from paceline.core.settings import (
    Section,
    flatten,
    from_table,
    merge_tables,
    own_hints,
    owner_names,
    owner_tables,
    settings_class,
    table_name,
    to_table,
)
from paceline.core.settings import unflatten as unflatten_names
from paceline.core.untrusted import ParseError, parse_toml
from paceline.data import DataSettings
from paceline.models.settings import ModelSettings
from paceline.optim.registry import SGD, optimizer_names, schedule_names
from paceline.optim.scaling import SCALED
from paceline.optim.settings import KnownGood, OptimSettings
from paceline.plan.wires import WIRES
from paceline.precision.settings import PrecisionSettings

# The version of all defaults, which a file names as `defaults`; a file without it has this version. Raise
# it when a default changes, and add the earlier default for files of older versions to `EARLIER`.
DEFAULTS = 2
EARLIER: dict[int, Tables] = {1: {"optim": {"scaling": "off"}}}


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run, with one section for each package that has settings."""

    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    comm: CommSettings = field(default_factory=CommSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def __post_init__(self) -> None:
        check_exclusions(self.exclusions(), **self.sections())

    def exclusions(self) -> list[Exclusion]:
        """Returns the combinations of settings that are refused, also those of optional tables."""
        owners = (s.exclusions() for s in self.sections().values() if isinstance(s, Section))
        return [*EXCLUSIONS, *chain.from_iterable(owners)]

    def check_job(self, job: Job, program: object = None) -> None:
        """Checks that the settings fit the job and the Python objects of the program.

        Args:
            job: Number of processes and kind of device.
            program: The objects that a Python program gave, or None.

        Raises:
            ConfigError: If a setting does not fit the job or the objects.
        """
        facts = {"job": job} | ({} if program is None else {"program": program})
        check_exclusions(self.exclusions(), **self.sections(), **facts)

    def check_wire(self, wire: str) -> None:
        """Checks that a wire format, which a plan file names, would be valid as `comm.wire`.

        Raises:
            ConfigError: If the wire format is refused.
        """
        replace(self, comm=replace(self.comm, plan="", wire=wire))

    def sections(self) -> dict[str, Any]:
        """Returns the settings object of each section."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> RunConfig:
        """Builds the configuration from the tables of a file.

        Raises:
            ConfigError: If a section or key does not exist, or a value is wrong.
        """
        values: dict[str, Any] = {}
        for section, table in with_earlier_defaults(tables).items():
            if not isinstance(table, dict):
                raise ConfigError(section, table, "is outside a section", _nearest_key(section))
            if section not in SECTIONS:
                raise ConfigError(section, None, "unknown section", nearest(section, SECTIONS))
            values[section] = from_table(SECTIONS[section], section, table)
        return cls(**values)

    def to_tables(self) -> Tables:
        """Returns all values as nested dictionaries, by section."""
        return {f.name: to_table(getattr(self, f.name)) for f in fields(self)}

    def to_toml(self) -> str:
        """Returns a TOML recipe with the settings in use and the version of the defaults."""
        return tomli_w.dumps({"defaults": DEFAULTS, **self.in_use()})

    def in_use(self) -> Tables:
        """Returns all values by section, without unused tables such as `[optim.lars]`."""
        tables = self.to_tables()
        for name, section in self.sections().items():
            for owner in section.unused() if isinstance(section, Section) else ():
                tables[name].pop(owner, None)
        return tables

    def flat(self) -> dict[str, Any]:
        """Returns all values by name, such as `run.seed` or `comm.hybrid.sizes`."""
        return flatten(self.to_tables())

    def with_values(self, values: Mapping[str, Any]) -> RunConfig:
        """Returns a copy with changed values, given as `{"section.key": value}`."""
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
    """Returns a remedy that suggests the setting whose key, without the section, is most similar."""
    known = {key: f"{s}.{key}" for s, kind in SECTIONS.items() for key in own_hints(kind)}
    hint = nearest(name.rpartition(".")[2], known)
    for key, full in known.items():
        hint = hint.replace(f"{key!r}", f"{full!r}")
    return hint if hint.startswith("did you mean") else "give it as section.key"


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Returns settings by section: the values of `below`, updated with those of `above` key by key.

    If `above` changes the image size or the channels, dependent settings of `below` are adapted, unless
    `above` sets these settings, too.
    """
    merged = merge_tables(below, above)
    lower, upper = below.get("data"), above.get("data")
    if isinstance(lower, Mapping) and isinstance(upper, Mapping):
        _follow_image(lower, upper, merged["data"])
    return merged


def _follow_image(
    below: Mapping[str, Any], above: Mapping[str, Any], merged: dict[str, Any]
) -> None:
    """Scales `eval_resize` with the image size; drops `mean` and `std` if the channels change."""
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


def setting_names() -> list[str]:
    """Returns the names of all settings, such as `run.seed` and `optim.lars.clip`."""
    names = []
    for section, kind in SECTIONS.items():
        names += [f"{section}.{key}" for key in own_hints(kind)]
        for table, own in owner_tables(kind):
            names += [f"{section}.{table}.{key}" for key in own_hints(own)]
    return names


def _defaults(tables: Mapping[str, Any]) -> RunConfig:
    """Returns the defaults of all sections, and of the optional tables that `tables` has or chooses."""
    kept: Tables = {}
    for section, kind in SECTIONS.items():
        table = tables.get(section)
        if isinstance(table, Mapping) and issubclass(kind, Section):
            own = own_hints(kind)
            given = {k for k, v in table.items() if k not in own and isinstance(v, Mapping)}
            chosen = {name for _, name in kind.choices_in(table)}
            chosen &= set(owner_names(kind))
            of = {table_name(settings_class(kind, name, name), name) for name in chosen}
            kept[section] = {owner: {} for owner in given | of}
    return RunConfig.from_tables(kept)


def changed_settings(config: RunConfig) -> list[str]:
    """Returns the names of the settings that differ from their defaults."""
    defaults = _defaults(config.to_tables()).flat()
    return sorted(name for name, value in config.flat().items() if defaults.get(name) != value)


def without_version(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a file, without the entry for the version of the defaults."""
    return {name: table for name, table in tables.items() if name != "defaults"}


def with_earlier_defaults(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a file, with the defaults of the version that the file names."""
    version, own = tables.get("defaults", DEFAULTS), without_version(tables)
    if version == DEFAULTS:
        return own
    if not isinstance(version, int) or version not in EARLIER:
        raise ConfigError(
            "defaults", version, "is not a version of the defaults that this Paceline knows",
            f"use the Paceline that wrote the file, or check all settings and set it to {DEFAULTS}",
        )  # fmt: skip
    return merge_tables(EARLIER[version], own)


def with_defaults(tables: Mapping[str, Any]) -> Tables:
    """Adds the defaults of missing settings to a stored configuration."""
    tables = without_version(tables)
    return merge(_defaults(tables).to_tables(), tables)


def unflatten(values: Mapping[str, Any]) -> Tables:
    """Returns `{"run": {"seed": 1}}` for `{"run.seed": 1}`.

    Raises:
        ConfigError: If a name has no section.
    """
    for name in values:
        if not all(name.partition(".")):
            raise ConfigError(name, None, "is not of the form section.key", _nearest_key(name))
    return unflatten_names(values)


_RATES = ("lr", "lr_base", "lr_base_batch")
# The default of `optim.warmup_max_share`: the share in the quickstart; most recipes have less.
WARMUP_MAX_SHARE = 0.2


def load_config(
    recipe: str | Tables | None, overrides: Mapping[str, Any], *, trust: bool = False
) -> RunConfig:
    """Builds a configuration from defaults, recipe and overrides.

    Args:
        recipe: The name of a recipe, a TOML file, or the tables of a recipe; None for the defaults. If
            the recipe chooses its settings when the run starts, the result has `RunSettings.pending`.
        overrides: Values that replace values of the recipe, as `{"section.key": value}`.
        trust: True to allow a recipe that names code to run.

    Raises:
        ConfigError: If a setting is unknown or wrong, or if the recipe names code without `trust`.
    """
    pending = None
    if isinstance(recipe, str) and recipe in CHOOSERS:
        pending, recipe = Pending(recipe, dict(overrides), trust), None
    own = read_recipe(recipe) if isinstance(recipe, str) else recipe or {}
    tables = with_earlier_defaults(own)
    RunConfig.from_tables(tables)  # reports a mistake in the recipe before one in a flag
    merged = merge(_without_rates(tables, overrides.get("optim.name")), unflatten(overrides))
    merged.setdefault("optim", {}).setdefault(
        "warmup_max_share", _warmup_share(tables, "optim.warmup_epochs" in overrides)
    )
    origin = recipe if isinstance(recipe, str) else "the run that is resumed"
    config = _from_file(merged, overrides, origin, trust)
    known = _known_good(tables, overrides, config)
    config = replace(config, optim=replace(config.optim, known_good=known))
    # The rule may choose another optimizer, which uses these settings.
    undecided = config.optim.follows_rule and "optim.name" not in overrides
    checked = {n: v for n, v in overrides.items() if not (undecided and n.startswith("optim."))}
    _refuse_unused(config, checked)
    if overrides.get("optim.warmup_epochs") and not config.optim.own_schedule.WARMS_UP:
        raise ConfigError(
            "optim.warmup_epochs", config.optim.warmup_epochs,
            f"is not supported with optim.schedule = {config.optim.schedule!r}, which has no warm-up",
            "leave it out, or use another schedule",
        )  # fmt: skip
    if pending is None:
        return config
    if {"run.minutes", "run.epochs"} <= overrides.keys():
        raise ConfigError(
            "run.minutes", config.run.minutes, "decides the number of epochs, but run.epochs is given",
            "leave one of them out",
        )  # fmt: skip
    return replace(config, run=replace(config.run, pending=pending))


def with_choices(config: RunConfig, tables: Tables, settles: Collection[str] = ()) -> RunConfig:
    """Returns the configuration of a run whose recipe has chosen its settings.

    Args:
        config: A configuration with `RunSettings.pending`.
        tables: The choices. Settings that the user has given override them.
        settles: Settings that the user has given and whose final value is in `tables`.
    """
    pending = config.run.pending
    assert pending is not None
    # The time has done its work: the choices contain the number of epochs.
    settled = {"run.minutes", *settles}
    given = {name: value for name, value in pending.given.items() if name not in settled}
    return load_config(tables, given, trust=pending.trust)


def _refuse_unused(config: RunConfig, overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError for a flag without effect, such as `optim.lars.clip` if LARS is not chosen.

    Recipes may contain such settings, because a flag can choose the optimizer, strategy or format that
    they belong to.
    """
    for name, value in overrides.items():
        section, *table, key = name.split(".")
        settings = config.sections()[section]
        if not table or not isinstance(settings, Section) or not settings.CHOOSERS:
            continue
        choosers = " or ".join(f"{section}.{chooser}" for chooser in settings.CHOOSERS)
        if table[0] in settings.unused():
            problem = f"{choosers} does not use [{section}.{table[0]}]"
        elif key in getattr(settings.owned[table[0]], "UNREAD", ()):
            problem = f"{choosers} does not use it"
        else:
            continue
        raise ConfigError(name, value, f"has no effect: {problem}", "leave it out, or choose it")


def stored_config(
    tables: Mapping[str, Any], overrides: Mapping[str, Any], origin: object, trust: bool | RunConfig
) -> RunConfig:
    """Builds the configuration that a checkpoint contains.

    Leaves out parts that another program registered and only training needs, such as an optimizer.

    Args:
        tables: The configuration tables in the checkpoint.
        overrides: Values that replace values in the checkpoint.
        origin: The checkpoint, for messages.
        trust: True to allow any code that the checkpoint names. A configuration of this program allows
            the code that it names itself.

    Raises:
        ConfigError: If the checkpoint names code that is not allowed, or a setting is unknown or wrong.
    """
    tables = _without_registered(tables)
    # Overrides first, because they may replace a value that is not valid in this version.
    stored = flatten(tables)
    known = {name: value for name, value in overrides.items() if name in stored}
    return _from_file(merge(tables, unflatten(known)), overrides, origin, trust).with_values(
        overrides
    )


def _without_registered(tables: Mapping[str, Any]) -> Tables:
    """Removes the optimizer, schedule, strategy and wire format that this program does not know.

    Another program registered these parts. Evaluation and export do not need them.
    """
    kept = {name: dict(table) for name, table in without_version(tables).items()}
    for section, setting, known in (
        ("optim", "name", optimizer_names()), ("optim", "schedule", schedule_names()),
        ("run", "strategy", STRATEGIES.names()), ("comm", "wire", WIRES.names()),
    ):  # fmt: skip
        table = kept.get(section, {})
        name = table.get(setting)
        if isinstance(name, str) and name not in known and re.fullmatch(r"[a-z][a-z0-9_]*", name):
            dropped = {setting, name, *(("arguments",) if setting == "name" else ())}
            kept[section] = {key: value for key, value in table.items() if key not in dropped}
    return {**tables, **kept}


def _from_file(
    tables: Mapping[str, Any], named: Mapping[str, Any], origin: object, trust: bool | RunConfig
) -> RunConfig:
    """Builds a configuration from a file; checks the code that it names, except in `named`."""
    config = RunConfig.from_tables(tables)
    if trust is not True:
        own = trust.flat() if isinstance(trust, RunConfig) else {}
        check_trust(config.flat(), {**own, **named}, origin)
    return config


def _known_good(recipe: Tables, overrides: Mapping[str, Any], config: RunConfig) -> KnownGood:
    """Returns which values come from a recipe or from flags, for the rule of `optim.scaling`."""
    optim, table = config.optim, recipe.get("optim", {})
    given = tuple(name for key in _RATES if (name := f"optim.{key}") in overrides)
    batch = recipe.get("run", {}).get("global_batch_size")
    name = table.get("name", OptimSettings.name)
    rated = name == optim.name and any(key in table for key in _RATES)
    is_own = rated and config.run.global_batch_size == batch and optim.known_good_batch is None
    if optim.scaling == "off" or given or is_own:
        return KnownGood(keeps=given)
    return KnownGood(
        batch=batch, optimizer=name if rated else "",
        named=rated or "name" in table or "optim.name" in overrides,
        momentum=table.get("momentum", OptimSettings.momentum),
        keeps=tuple(name for name in SCALED if name in overrides),
    )  # fmt: skip


def _without_rates(recipe: Tables, optimizer: object) -> Tables:
    """Drops the learning rates of a recipe for another optimizer if a flag chooses an Adam variant.

    Adam needs rates that are some hundred times smaller.
    """
    own = recipe.get("optim", {}).get("name", OptimSettings.name)
    if optimizer is None or optimizer == own or _rates_of(optimizer) == SGD:
        return recipe
    kept = {k: v for k, v in recipe.get("optim", {}).items() if k not in ("lr", "lr_base")}
    return {**recipe, "optim": kept}


def _rates_of(optimizer: object) -> str:
    """Returns the kind of learning rates of an optimizer (`RATES`); "" for a class or an unknown name."""
    kind = settings_class(OptimSettings, str(optimizer), "optim.name")
    return getattr(kind, "RATES", "")


def _warmup_share(recipe: Tables, asked: bool) -> float:
    """Returns the default of `optim.warmup_max_share`, the largest fraction of a run for warm-up.

    Without this limit, a recipe with 3 epochs of warm-up and `--epochs 2` would end during warm-up.
    """
    if asked:
        return 1.0
    warmup = float(recipe.get("optim", {}).get("warmup_epochs", 0.0))
    share = warmup / int(recipe.get("run", {}).get("epochs", RunSettings.epochs))
    # Rounded up to whole percents, so that the recipe at its full length keeps every step of warm-up.
    return max(WARMUP_MAX_SHARE, min(1.0, math.ceil(round(100 * share, 6)) / 100))


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parses a value of `--set`, `section.key=value`, to a name and a value."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError("--set", text, "is not of the form section.key=value")
    return name, parse_value(name, value.strip())


def parse_value(name: str, text: str) -> Any:
    """Parses the text of a flag as the value of `name`, in TOML or as a number in Python's notation.

    For a setting of type str, the text itself is the value, so that `--output 7` names a folder.
    """
    try:
        value = parse_toml(f"value = {text}".encode(errors="surrogateescape"))["value"]
    except ParseError:
        value = text
    if _type_of(name) is str:
        return value if isinstance(value, str) else text
    if value is text:
        with contextlib.suppress(ValueError):
            return float(text)
    return value


def _type_of(name: str) -> Any:
    """Returns the declared type of a setting; None if there is no such setting."""
    section, *owner = name.split(".")
    key = owner.pop() if owner else ""
    kind: type | None = SECTIONS.get(section)
    if kind is not None and owner:
        kind = settings_class(kind, owner[0], name)
    return None if kind is None else own_hints(kind).get(key)
