"""Recipes: TOML files with settings, and `auto`, which chooses settings for the user's own data.

The files are data of the core, which reads them by path. `PROVIDES` lists the recipes that choose.
"""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {"recipes": {"auto": "recipes.auto:RECIPE"}}
