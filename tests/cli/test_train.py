from __future__ import annotations

import pytest

from paceline.cli.train import child_arguments, resolve


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
