"""The list of mutants follows the code; `make mutants` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.mutant import Mutant, read_mutants

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.name)
def test_it_is_a_change_of_one_place_and_has_tests(mutant: Mutant) -> None:
    compile(mutant.mutated(ROOT), mutant.file, "exec")
    assert mutant.source != mutant.replacement
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in text if name else text


def test_there_are_enough() -> None:
    names = [mutant.name for mutant in read_mutants()]
    assert len(set(names)) == len(names) >= 25
