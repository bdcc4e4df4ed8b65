"""The confusion matrix of a page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

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
    for text in ("predicted as →", "class ↓", "1,200", "30", "7", "right", "wrong", "0 %"):
        assert text in lines
    assert "0" not in lines, "empty cells have no number"
    assert "dog predicted as <b>: 1 of 8" in lines
    assert ("fill-opacity", "0.976") in page.attributes
    # The letters have the size of the style sheet, whatever the number of classes.
    assert not {"viewbox", "viewBox"} & {name for name, _ in page.attributes}


@pytest.mark.parametrize("classes", [2, 30])
def test_labels_and_numbers_fit_into_the_matrix(tmp_path: Path, classes: int) -> None:
    names = ["a name of thirty letters, or so"] * classes
    counts = [[n, n, 123_456] for n in range(classes)]
    matrix = evaluation_of(tmp_path, names, counts).matrix()
    width, height = (
        float(re.findall(rf' {side}="([\d.]+)"', matrix)[0]) for side in ("width", "height")
    )
    places = re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"', matrix)
    assert len(places) > classes
    assert all(0 < float(x) < width and 0 < float(y) < height for x, y in places)
    (cell,) = set(re.findall(r'<rect class="cell right"[^>]* width="([\d.]+)"', matrix)) - {"29"}
    assert float(cell) > 6.5 * len("123,456")


def test_too_many_classes_have_no_matrix(tmp_path: Path) -> None:
    assert not evaluation_of(tmp_path, ["a"] * 31, [[0, 0, 1]]).matrix()
