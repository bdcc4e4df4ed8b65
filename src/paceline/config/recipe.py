"""Finds and reads recipes.

A recipe is a TOML file with settings, or a program that chooses settings when the run starts, because
they depend on the data and the machine. Until it has chosen, `RunSettings.pending` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.core.extensions import Registry, missing_packages
from paceline.core.files import read_regular
from paceline.core.untrusted import ParseError, parse_toml

Tables = dict[str, dict[str, Any]]
RECIPES = Path(__file__).parents[1] / "recipes"
# Recipes that choose settings when the run starts: parts with the interface `train.Chooser`.
CHOOSERS: Registry[Any] = Registry("recipes", {})
QUICKSTART = "quickstart"


def default_recipe(values: Mapping[str, Any], *, own_data: bool) -> str | None:
    """Returns the recipe of a run for which the user names none.

    Args:
        values: The settings that the user has given.
        own_data: True if the user has given data.
    """
    if own_data:
        return next(iter(CHOOSERS.names()), None)
    return None if {"data.dir", "data.source"} & values.keys() else QUICKSTART


def recipe_names() -> list[str]:
    """Returns the names of the shipped recipe files."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def read_recipe(name: str) -> Tables:
    """Reads a shipped recipe, or the TOML file `name` if it is a path."""
    path = RECIPES / f"{name}.toml"
    if name not in recipe_names():
        path = Path(name)
        if path.suffix != ".toml" and not path.exists():
            known = [*recipe_names(), *CHOOSERS.names()]
            raise ConfigError("recipe", name, "unknown", nearest(name, known) + missing_packages())
    try:
        tables = parse_toml(read_regular(path))
    except FileNotFoundError:
        raise ConfigError(
            "recipe", name, "no such file", "shipped: " + ", ".join(recipe_names())
        ) from None
    except OSError as error:
        raise ConfigError("recipe", name, f"cannot be read ({error.strerror})") from None
    except ParseError as error:
        raise ConfigError("recipe", name, f"is not TOML: {error}", "fix that line") from None
    tables.setdefault("run", {})
    if isinstance(tables["run"], dict):
        tables["run"].setdefault("name", path.stem)
    return tables
