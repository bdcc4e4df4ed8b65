"""Classes, confusions and mistakes of an evaluation: exact over ranks, and shown by the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.comm import CommSettings, Group
from paceline.core.topology import Topology
from paceline.report import RunFiles
from paceline.train.eval_details import MISTAKES, EvalDetails, thumbnail, wants_details
from paceline.train.inputs import common_settings
from report.html_reader import run_page
from small_runs import run_on_ranks, run_small, small_config


def test_counts_and_the_most_confident_mistakes() -> None:
    classes = 4
    details = EvalDetails(classes, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    outputs = 3 * torch.randn(60, classes, generator=generator)
    labels = torch.randint(classes, (60,), generator=generator)
    images = torch.randint(0, 255, (60, 8, 12, 3), generator=generator).to(torch.uint8)
    for part in torch.arange(60).split(25):
        details.add(outputs[part], labels[part], images[part])
    with Group(Topology(), CommSettings(), torch.device("cpu")) as group:
        content = details.gather(group, 1, list("abcd"))
    found = json.loads(content)
    predicted = outputs.argmax(1)
    counts = {(label, guess): count for label, guess, count in found["counts"]}
    for label in range(classes):
        for guess in range(classes):
            expected = int(((labels == label) & (predicted == guess)).sum())
            assert counts.get((label, guess), 0) == expected
    wrong = outputs.softmax(1).max(1).values[predicted != labels].sort(descending=True).values
    assert [m["confidence"] for m in found["mistakes"]] == pytest.approx(
        [round(float(value), 4) for value in wrong[:MISTAKES]], abs=1e-4
    )
    assert all(m["image"] for m in found["mistakes"])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_thumbnails(channels: int) -> None:
    made = thumbnail(torch.zeros(300, 200, channels, dtype=torch.uint8))
    assert bool(made) == (channels in (1, 3))
    assert len(made) < 4000


def test_two_ranks_find_the_same_counts_as_one(tmp_path: Path) -> None:
    run_small(tmp_path / "one", run__batch_size=8)
    run_on_ranks(2, tmp_path / "two", {"run__batch_size": 8})
    one, two = (json.loads((tmp_path / n / "evaluation.json").read_text()) for n in ("one", "two"))
    assert sum(count for *_, count in one["counts"]) == sum(count for *_, count in two["counts"])
    assert one["classes"] == two["classes"]
    page = run_page(tmp_path / "two")
    assert "Accuracy by class, lowest first" in page.tables
    assert page.tags.count("image") == len(two["mistakes"])
    evaluations = RunFiles.read(tmp_path / "two").of_kind("eval")
    right = sum(count for label, guess, count in two["counts"] if label == guess)
    assert 100 * right / evaluations[-1]["samples"] == pytest.approx(evaluations[-1]["top1"])


def test_off_for_large_sets_unless_asked_for(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    assert wants_details(config, 20_000, 1_000)
    assert not wants_details(config, 50_000, 1_000)
    assert not wants_details(config, 100, 1_001)
    assert wants_details(config.with_values({"run.eval_details": "on"}), 50_000, 1_000)


def test_ranks_compare_the_setting_because_gathering_is_a_collective(tmp_path: Path) -> None:
    compared = common_settings(small_config(tmp_path, run__eval_details="off"))
    assert compared["run.eval_details"] == "off"
    assert "run.trackers" not in compared, "rank 0's own"
