from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from paceline.core.errors import ConfigError
from paceline.plan.workload import Affine, Workload
from plan.made import made_workload


def test_it_comes_back_from_a_file(tmp_path: Path) -> None:
    work = made_workload(half=True)
    work.write(tmp_path / "w.toml")
    assert Workload.read(tmp_path / "w.toml") == work


def test_times_are_affine() -> None:
    work = made_workload()
    assert work.compute_s(10) == pytest.approx(1e-3 + 1e-3 + 2e-3 + 2e-3 + 5e-4)
    assert work.ready_s(10) == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradients": ()}, "empty"),
        ({"update_s": -1.0}, "update_s"),
        ({"forward": Affine(-1.0, 0.0)}, "forward.fixed_s"),
        ({"backward": Affine(0.0, float("nan"))}, "backward.per_image_s"),
        ({"forward": Affine(0, 0), "backward": Affine(0, 0)}, "no time"),
    ],
)
def test_figures_that_cannot_be(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(made_workload(), **changes)  # type: ignore[arg-type]


def test_shares_must_rise() -> None:
    with pytest.raises(ConfigError, match="must rise"):
        made_workload((1, 1), ready=(0.9, 0.3))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("half", "x"),
        ("half", float("nan")),
        ("half", [1, 2]),
        ("half", "x" * 3000),
        ("name", ["a"]),
        ("elements", 2**63),
        ("elements", 2**62),
        ("elements", 1.5),
        ("elements", -1),
        ("ready", float("nan")),
        ("ready", True),
    ],
)
def test_gradients_of_another_type(tmp_path: Path, field: str, value: object) -> None:
    table = made_workload().to_table()
    table["workload"]["gradients"][0][field] = value
    (tmp_path / "w.toml").write_text(tomli_w.dumps(table))
    with pytest.raises(ConfigError, match="gradients") as caught:
        Workload.read(tmp_path / "w.toml")
    assert len(str(caught.value)) < 700


def test_a_gradient_is_there_once(tmp_path: Path) -> None:
    table = made_workload().to_table()
    rows = table["workload"]["gradients"]
    rows[1]["name"] = rows[0]["name"]
    (tmp_path / "w.toml").write_text(tomli_w.dumps(table))
    with pytest.raises(ConfigError, match="twice"):
        Workload.read(tmp_path / "w.toml")


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[workload]\nmodel = 'x'\n")
    (tmp_path / "b.toml").write_text("nothing")
    for name, words in (("a.toml", "not a profile"), ("b.toml", "cannot be read"),
                        ("c.toml", "cannot be read")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            Workload.read(tmp_path / name)
