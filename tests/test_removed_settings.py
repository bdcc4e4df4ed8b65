"""Settings that were removed, in flags, files, run folders and checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tomli_w

from paceline.config import (
    REMOVED,
    RENAMED,
    RunConfig,
    load_config,
    merge,
    setting_names,
    stored_config,
    unflatten,
    with_defaults,
)
from paceline.core.errors import ConfigError
from paceline.core.extensions import load_part, provided
from paceline.train import Checkpoint
from paceline.train.run_state import check_pinned

OF_EXTENSIONS = {
    name: load_part(place, name, None)[name] for name, place in provided("renamed settings").items()
}
NEW_NAMES = {**RENAMED, **OF_EXTENSIONS}
EARLIER = {**REMOVED, **NEW_NAMES}
USUAL = unflatten({name: value for name, (value, _) in EARLIER.items() if value is not None})
# Of a number, a text, a switch and a pair.
OTHERS = {
    float: 0.75,
    int: 7,
    str: "other",
    bool: True,
    list: [0.1, 0.2],
    dict: {"other": 7},
    type(None): 7.0,
}


def other(name: str) -> Any:
    usual = EARLIER[name][0]
    return not usual if isinstance(usual, bool) else OTHERS[type(usual)]


def checkpoint_of(tables: dict[str, Any]) -> Checkpoint:
    return cast("Checkpoint", SimpleNamespace(config=tables))


def test_removed_settings_do_not_exist() -> None:
    assert not set(setting_names()) & EARLIER.keys()
    new = {name for _, names in NEW_NAMES.values() for name in names.split(" or ")}
    tables = {name.rpartition(".")[0] for name in setting_names()}
    assert new <= {*setting_names(), *tables}


@pytest.mark.parametrize("name", EARLIER)
def test_another_value_is_refused_with_a_remedy(name: str, tmp_path: Path) -> None:
    tables = unflatten({name: other(name)})
    file = tmp_path / "old.toml"
    file.write_text(tomli_w.dumps(tables))

    for refused in (
        lambda: load_config(None, {name: other(name)}),
        lambda: load_config(str(file), {}),
        lambda: stored_config(tables, {}, file, True),
        lambda: check_pinned(checkpoint_of(tables), RunConfig(), file),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert (caught.value.field, bool(caught.value.remedy)) == (name, True)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("run.shares", "unequal"), ("comm.servers", "asynchronous"), ("rehearse.nodes", "rehearsal"),
     ("model.norm_group", "synced_norms")],
)  # fmt: skip
def test_a_setting_of_a_strategy_names_what_chooses_it(name: str, strategy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {name: other(name)})
    assert f"run.strategy = {strategy!r}" in caught.value.remedy


def test_the_value_that_applies_now_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(tomli_w.dumps(USUAL))
    assert load_config(str(file), {"run.name": "run"}) == load_config(None, {})
    assert stored_config(USUAL, {}, file, True) == RunConfig()
    assert with_defaults(USUAL) == RunConfig().to_tables()
    check_pinned(checkpoint_of(merge(RunConfig().to_tables(), USUAL)), RunConfig(), file)
