"""The budgets of the architecture: sizes that may only fall.

`LIMITS` contains today's values, those above a thousand rounded up to hundreds. A change that lowers a
value lowers its limit in the same commit. A change that raises one says in its commit what it needs the
room for, and what was removed in exchange.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from cli_runs import IMAGES, run
from design.loaded_modules import install
from paceline.config import setting_names

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"

# The number of modules that a training step executes is in test_call_path.py.
LIMITS = {
    "lines of code in src/paceline": 43_400,
    "lines of code that a training imports": 20_400,
    "lines of code in tests": 42_200,
    "settings": 150,
    "lines of the longest function": 80,
    "lines of the longest module": 485,
    "words in docs, README and DESIGN": 29_200,
}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(source: str) -> int:
    """Lines with a token that is neither a comment nor part of a docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def longest_function(source: str) -> int:
    """Lines of the longest function, with its signature and without its decorators."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]
    return max(((node.end_lineno or 0) - node.lineno + 1 for node in functions), default=0)


def texts(paths: Iterable[Path]) -> list[str]:
    return [path.read_text() for path in paths]


def words() -> int:
    pages = [ROOT / "README.md", ROOT / "DESIGN.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.split()) for page in texts(pages))


def over(name: str, value: int) -> str:
    """An explanation if the value exceeds its limit."""
    return f"{name}: {value:,}, the limit is {LIMITS[name]:,}" if value > LIMITS[name] else ""


def test_no_size_exceeds_its_budget() -> None:
    modules, tests = texts(SOURCE.rglob("*.py")), texts((ROOT / "tests").rglob("*.py"))
    # Kernels may be moved, but not edited, while no GPU is at hand.
    editable = texts(file for file in SOURCE.rglob("*.py") if not file.stem.endswith("kernels"))
    values = {
        "lines of code in src/paceline": sum(map(lines_of_code, modules)),
        "lines of code in tests": sum(map(lines_of_code, tests)),
        "settings": len(setting_names()),
        "lines of the longest function": max(map(longest_function, editable)),
        "lines of the longest module": max(len(module.splitlines()) for module in modules),
        "words in docs, README and DESIGN": words(),
    }
    assert [over(name, value) for name, value in values.items() if over(name, value)] == []


def test_a_training_imports_little(tmp_path: Path) -> None:
    """`paceline train` on the embedded data, one process on the CPU, report included."""
    flags = ["train", *IMAGES, "-b", "128", "--epochs", "1", "--set", "data.image_size=8"]
    done = run([*flags, "--output", "run"], tmp_path, partial(install, tmp_path / "modules.json"))
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "report.html").exists()
    loaded = json.loads((tmp_path / "modules.json").read_text())
    name = "lines of code that a training imports"
    assert not (problem := over(name, sum(map(lines_of_code, texts(map(Path, loaded)))))), problem


@pytest.mark.parametrize(
    ("source", "lines"),
    [('"""Of a module."""\n\n# A comment.\nx = 1  # another\n', 1),
     ('def f():\n    """Of\n    a function."""\n    return """two\n    lines"""\n', 3),
     ("call(\n\n    1,\n    # why\n    2,\n)\n", 4)],
)  # fmt: skip
def test_docstrings_comments_and_blank_lines_are_no_code(source: str, lines: int) -> None:
    assert lines_of_code(source) == lines
