"""The JSON object holds every number, unrounded."""

import json
from pathlib import Path

import pytest

from paceline.report.compare_page import json_object
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from report.made_up_ablations import write_ablation


def test_the_object(tmp_path: Path) -> None:
    found = json_object(Comparison.of(read_runs(write_ablation(tmp_path))))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["caption"].startswith("all: model resnet18")
    assert found["baseline"] == "optim.name=sgd"
    assert found["differing"] == ["optim.name", "run.global_batch_size", "optim.lr_base"]
    assert len(found["notes"]) == 2
    sgd, lars, half = found["rows"]
    assert lars["settings"] == {
        "optim.name": "lars",
        "run.global_batch_size": 2500,
        "optim.lr_base": 3.0,
    }
    assert (lars["n"], lars["top1_min"], lars["top1_max"]) == (3, 93.0, 93.2)
    assert lars["top1_std"] == pytest.approx(0.1)
    assert lars["difference_points"] == pytest.approx(-1.1)
    assert lars["difference_standard_error"] == pytest.approx((0.08 / 2 + 0.01 / 3) ** 0.5)
    assert sgd["difference_points"] is None
    assert lars["seeds"] == [run["seed"] for run in lars["runs"]] == [0, 1, 2]
    assert lars["runs"][1]["path"] == str(tmp_path / "lars-1")
    assert (half["complete"], half["epochs_done_max"], half["epochs_planned"]) == (False, 2.0, 4.0)
    assert half["runs"][0]["state"] == "unfinished"
