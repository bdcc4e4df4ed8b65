"""`RunConfig`: the settings of a run, composed of the settings of the packages.

Flags override a recipe (a shipped one or a TOML file), and a recipe overrides the defaults. Unknown
keys are errors.
"""

from paceline.config.exclusions import Job
from paceline.config.recipe import (
    CHOOSERS,
    RECIPES,
    default_recipe,
    read_recipe,
    recipe_names,
)
from paceline.config.run_config import (
    DEFAULTS,
    SECTIONS,
    RunConfig,
    changed_settings,
    load_config,
    merge,
    parse_assignment,
    parse_value,
    setting_names,
    stored_config,
    unflatten,
    with_choices,
    with_defaults,
)
from paceline.config.settings import (
    STRATEGIES,
    SYNCHRONOUS,
    CheckpointSettings,
    Pending,
    RunSettings,
)

__all__ = [
    "CHOOSERS",
    "DEFAULTS",
    "RECIPES",
    "SECTIONS",
    "STRATEGIES",
    "SYNCHRONOUS",
    "CheckpointSettings",
    "Job",
    "Pending",
    "RunConfig",
    "RunSettings",
    "changed_settings",
    "default_recipe",
    "load_config",
    "merge",
    "parse_assignment",
    "parse_value",
    "read_recipe",
    "recipe_names",
    "setting_names",
    "stored_config",
    "unflatten",
    "with_choices",
    "with_defaults",
]
