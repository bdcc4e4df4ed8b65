"""The confusion matrix of a page."""

import json
from pathlib import Path
from typing import Any

from paceline.report.evaluation import Evaluation
from report.html_reader import Page


def evaluation_of(folder: Path, classes: list[str], counts: list[list[int]]) -> Evaluation:
    content: dict[str, Any] = {"step": 1, "classes": classes, "counts": counts}
    (folder / "evaluation.json").write_text(json.dumps(content))
    found = Evaluation.read(folder)
    assert found is not None
    return found


def test_a_matrix_has_labels_numbers_and_a_legend(tmp_path: Path) -> None:
    counts = [[0, 0, 1200], [0, 1, 30], [1, 1, 7], [1, 2, 1], [2, 2, 0]]
    page = Page(evaluation_of(tmp_path, ["cat", "dog", "<b>"], counts).matrix())
    lines = page.text.splitlines()
    for name in ("cat", "dog", "<b>"):
        assert lines.count(name) == 2, "a row and a column"
    assert {"1,200", "30", "7"} <= set(lines)
    assert "0" not in lines, "empty cells have no number"


def test_too_many_classes_have_no_matrix(tmp_path: Path) -> None:
    assert not evaluation_of(tmp_path, ["a"] * 31, [[0, 0, 1]]).matrix()
