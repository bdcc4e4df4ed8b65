"""The core contains nothing of an extension: no import, name, setting, record field or checkpoint key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.core.extensions import provided
from paceline.extensions import PACKAGES

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
CORE = (
    "core", "plan", "data", "models", "precision", "optim", "comm", "config", "train", "trainer.py",
    "custom_loop",
)  # fmt: skip
# Stems of words by which methods are known, in addition to the names in `PROVIDES`.
STEMS = (
    "asynchron", "staleness", "parameter_?server", "rehears", "svrg", "halp", "anchor", "eight_?bit",
)  # fmt: skip
# Words of the core that are also the name of a module.
COMMON = {"settings", "wires", "strategy", "source", "acceleration", "recipes"}
KINDS = ("strategies", "wires", "optimizers", "schedules", "gradient sources", "sources")


def core_modules() -> Iterator[Path]:
    for part in CORE:
        path = SOURCE / part
        yield from [path] if path.suffix else sorted(path.rglob("*.py"))


def words_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields names, attributes, arguments, keywords and texts of a module, without its docstrings."""
    tree = ast.parse(source)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text and id(node) not in documentation:
            yield node.lineno, node.value
        for field in ("id", "attr", "arg", "name", "module", "asname"):
            if isinstance(text := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), text


def names_of_extensions() -> set[str]:
    found = set(PACKAGES)
    for kind in KINDS:
        for name, place in provided(kind).items():
            found |= {name, place.partition(":")[0].rpartition(".")[2]}
    return found - COMMON


def test_no_core_module_names_an_extension() -> None:
    names = "|".join(sorted(map(re.escape, names_of_extensions())))
    pattern = re.compile(rf"(?<![a-z])(?:{names})(?![a-z])|{'|'.join(STEMS)}", re.I)
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text[:60]!r}"
        for path in core_modules()
        for line, text in words_of(path.read_text())
        if pattern.search(text)
    ]
    assert found == []
