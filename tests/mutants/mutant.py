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
        """Returns the text of `file` with the bug; raises StaleMutantError if the source has changed."""
        path = root / PACKAGE / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.source) != 1:
            count = text.count(self.source)
            raise StaleMutantError(f"{self.name}: source is {count} times in {self.file}")
        return text.replace(self.source, self.replacement)


def read_mutants() -> list[Mutant]:
    table = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in table["mutant"]]
