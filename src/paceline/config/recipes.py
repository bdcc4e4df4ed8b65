"""Where values come from: defaults, then a recipe (shipped, by name, or a TOML file), then flags."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from paceline.config.run_config import SECTIONS, RunConfig, Tables, merge, unflatten
from paceline.config.settings import RunSettings
from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import from_table
from paceline.core.untrusted import ParseError, parse_toml
from paceline.optim.scaling import SCALED
from paceline.optim.setting_rules import OPTIMIZERS_OF_SGD
from paceline.optim.settings import OptimSettings

RECIPES = Path(__file__).parents[1] / "recipes"
# The quickstart's own share, and more than most recipes have; those with more state it themselves.
WARMUP_MAX_SHARE = 0.2


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
