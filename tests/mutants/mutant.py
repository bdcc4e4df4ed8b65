"""The list of mutants, and how one is applied to a copy of the source."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("mutants.toml")
PACKAGE = Path("src/paceline")


class StaleMutantError(Exception):
    """A mutant whose source is not found exactly once: the list has to follow the code."""


@dataclass(frozen=True)
class Mutant:
    """`file` is below src/paceline; `tests` are files or node ids below tests."""

    name: str
    breaks: str
    file: str
    source: str
    replacement: str
    tests: tuple[str, ...]

    def mutated(self, root: Path) -> str:
        """The text of `file` with the bug in it. StaleMutantError names files that hold the source."""
        path = root / PACKAGE / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.source) != 1:
            found = self._elsewhere(root)
            raise StaleMutantError(
                f"{self.name}: source is {text.count(self.source)} times in {self.file}; "
                + (
                    f"it is in {', '.join(found)}"
                    if found
                    else "no file has it: rewrite the mutant"
                )
            )
        return text.replace(self.source, self.replacement)

    def _elsewhere(self, root: Path) -> list[str]:
        package = root / PACKAGE
        return [
            str(path.relative_to(package))
            for path in sorted(package.rglob("*.py"))
            if self.source in path.read_text(encoding="utf-8")
        ]


def read_mutants() -> list[Mutant]:
    table = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in table["mutant"]]
