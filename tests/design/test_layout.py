"""The layout that DESIGN.md promises: folders import one way, and a small module has a reason."""

from __future__ import annotations

import ast
import functools
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import paceline
from paceline.extensions import PACKAGES

ROOT = Path(paceline.__file__).parent
# Modules under 60 lines with a single importer. Each has a reason to stand alone.
SMALL: dict[str, str] = {}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module path → the module paths that it imports, at the top and inside functions."""
    paths = {
        ".".join(("paceline", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): p
        for p in ROOT.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for path in paths.values():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    names.add(full if full in paths else str(node.module))
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if alias.name in paths}
        here = path.relative_to(ROOT).as_posix()
        found[here] = {paths[n].relative_to(ROOT).as_posix() for n in names if n in paths} - {here}
    return found


def loaded_by_name() -> set[str]:
    """Modules in the tables of extension packages."""
    places = (p for package in PACKAGES for p in tables(package))
    return {place.partition(":")[0].replace(".", "/") + ".py" for place in places}


def tables(package: str) -> Iterator[str]:
    for table in importlib.import_module(f"paceline.{package}").PROVIDES.values():
        yield from table.values()


def folder(module: str) -> str:
    """Modules at the top, such as the configuration and the Trainer, are layers of their own."""
    parent = str(Path(module).parent)
    return module if parent == "." else parent


def test_no_two_folders_import_each_other() -> None:
    folders: dict[str, set[str]] = defaultdict(set)
    for module, others in imports().items():
        # A package's __init__ re-exports names of its sub-packages; __main__ starts the command.
        if not module.endswith(("__init__.py", "__main__.py")):
            folders[folder(module)] |= {folder(other) for other in others}
    two_way = {
        frozenset((a, b)) for a, bs in folders.items() for b in bs if a in folders[b] and a != b
    }
    assert two_way == set()


def test_a_small_module_with_one_importer_has_a_reason() -> None:
    importers: dict[str, set[str]] = defaultdict(set)
    for module, others in imports().items():
        for other in others:
            importers[other].add(module)
    small = {
        module
        for module in imports()
        if len(importers[module]) == 1
        and not module.endswith(("__init__.py", "__main__.py"))
        and len((ROOT / module).read_text().splitlines()) < 60
        and module not in loaded_by_name()
    }
    assert small <= set(SMALL), f"merge into the importer, or give a reason: {small - set(SMALL)}"
    assert len(SMALL) <= 5


def test_only_resolve_changes_a_loaded_configuration() -> None:
    changing = set()
    for path in [*(ROOT / "train").rglob("*.py"), ROOT / "cli" / "dry_run.py"]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func).rpartition(".")[2]
            copies = (
                name == "replace" and call.args and ast.unparse(call.args[0]).endswith("config")
            )
            if name == "with_values" or copies:
                changing.add(path.name)
    assert changing == {"resolve.py"}
