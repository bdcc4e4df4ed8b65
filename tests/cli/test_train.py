from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import Call, small
from paceline.cli.train import child_arguments, resolve
from paceline.core.events import read_events


def test_without_anything_it_is_the_quickstart() -> None:
    assert resolve(None, {}, []).run.name == "quickstart"
    assert resolve(None, {}, []).data.source == "embedded"


def test_data_of_ones_own_starts_from_plain_defaults() -> None:
    config = resolve(None, {"data.dir": "/data"}, [])
    assert (config.run.name, config.model.name, config.data.image_size) == ("run", "resnet50", 224)


def test_data_of_ones_own_takes_the_place_of_the_embedded_set() -> None:
    config = resolve("quickstart", {"data.dir": "/data"}, [])
    assert (config.data.source, config.data.dir) == ("auto", "/data")
    assert config.model.name == "resnet_tiny"


def test_set_is_a_flag_like_any_other() -> None:
    config = resolve("quickstart", {"run.seed": 1}, ["run.seed=2", "data.mean=[0.5]"])
    assert config.run.seed == 2
    assert config.data.mean == (0.5,)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["train", "--nproc-per-node", "2", "-b", "8"], ["train", "-b", "8"]),
        (["train", "--nproc-per-node=2", "q"], ["train", "q"]),
        (["train", "--master-port", "1", "--max-restarts=3", "--lr", "1"], ["train", "--lr", "1"]),
    ],
)
def test_children_do_not_launch_again(given: list[str], kept: list[str]) -> None:
    assert child_arguments(given) == kept


def test_a_warm_up_that_would_fill_a_short_run_is_cut_and_shown(call: Call, tmp_path: Path) -> None:
    own = [word for word in small("--output", "run") if word not in ("--warmup-epochs", "0.5")]
    done = call(*own)
    assert done.code == 0, done.err
    chosen = json.loads((tmp_path / "run/summary.json").read_text())["chosen"]
    for words in (done.out, chosen["warm-up"]):
        assert (
            "0.416 epochs instead of 5" in words
        )  # a fifth of 13 steps, of which an epoch has 6.25
    events = read_events(tmp_path / "run/metrics.jsonl")
    rates = [event["lr"] for event in events if event["event"] == "step"]
    assert max(rates) == pytest.approx(0.05, rel=0.05)
    assert rates[-1] < 0.01
