"""Settings that belong to an owner: read, written, chosen, checked and refused as tables of a section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, check_exclusions, one_of
from paceline.core.settings import (
    Section,
    flatten,
    from_table,
    merge_tables,
    read_names,
    register_settings,
    to_table,
    unflatten,
)


@dataclass(frozen=True)
class FanSettings:
    speed: int = 3
    quiet: bool = False

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "room.fan.quiet", one_of(True), {"room.doors": one_of(0)}, "needs a door", "add one"
        ),
    )


@dataclass(frozen=True)
class RoomSettings(Section):
    NAME: ClassVar[str] = "room"
    OWNERS: ClassVar[Mapping[str, str]] = {"gone": "no_such_package.settings:GoneSettings"}
    CHOOSERS: ClassVar[tuple[str, ...]] = ("device", "lamps")

    device: str = "none"
    doors: int = 1
    lamps: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlueSettings(FanSettings):
    TABLE: ClassVar[str] = "fan"
    UNREAD: ClassVar[tuple[str, ...]] = ("quiet",)
    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = ()


@pytest.fixture(autouse=True)
def fan(registrations: None) -> None:
    register_settings("room", "fan", FanSettings)
    register_settings("room", "flue", FlueSettings)


def room(**values: object) -> RoomSettings:
    return from_table(RoomSettings, "room", values)


def test_a_table_is_read_and_written() -> None:
    made = room(device="fan", fan={"speed": 5})
    assert made.of("fan", FanSettings) == FanSettings(speed=5)
    assert to_table(made)["fan"] == {"speed": 5, "quiet": False}
    assert from_table(RoomSettings, "room", to_table(made)) == made


@pytest.mark.parametrize("values", [{"device": "fan"}, {"lamps": ["fan"]}])
def test_what_a_setting_chooses_has_its_defaults(values: dict[str, object]) -> None:
    assert dict(room(**values).owned) == {"fan": FanSettings()}
    assert dict(replace(room(), **values).owned) == {"fan": FanSettings()}  # type: ignore[arg-type]


def test_what_nothing_chooses_is_not_there_unless_given() -> None:
    assert room().owned == {}
    assert room().of("fan", FanSettings) == FanSettings()
    assert room(fan={"speed": 4}).unused() == ["fan"]
    assert room(device="fan").unused() == []


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"fan": {"sped": 4}}, "room.fan.sped"),
        ({"fan": {"speed": "high"}}, "room.fan.speed"),
        ({"fan": 4}, "room.fan"),
        ({"van": {"speed": 4}}, "room.van"),
        ({"device": "gone"}, "room.device"),
        ({"gone": {"speed": 4}}, "room.gone"),
    ],
)
def test_a_mistake_is_refused_by_its_name(values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        room(**values)
    assert caught.value.field == field
    assert caught.value.remedy


@pytest.mark.parametrize("value", [5, True, {"fan": 1}, None, [["fan"]]])
def test_what_is_no_name_chooses_nothing(value: object) -> None:
    assert list(RoomSettings.choices_in({"device": value, "lamps": ["fan"]})) == [("lamps", "fan")]


def test_owners_share_a_table() -> None:
    made = room(device="flue", fan={"speed": 5})
    assert dict(made.owned) == {"fan": FlueSettings(speed=5)}
    assert made.chosen("flue") is made.owned["fan"]
    assert made.of("fan", FanSettings) == FanSettings(speed=5)
    assert made.unused() == []
    assert replace(made, device="fan").chosen("fan") == FanSettings(speed=5)
    assert from_table(RoomSettings, "room", to_table(made)) == made
    assert read_names(FlueSettings) == {"speed"}
    with pytest.raises(ConfigError) as caught:
        room(flue={"speed": 5})
    assert caught.value.field == "room.flue"


def test_rows_of_a_chosen_owner_are_checked() -> None:
    chosen = room(device="fan", doors=0, fan={"quiet": True})
    with pytest.raises(ConfigError) as caught:
        check_exclusions(chosen.exclusions(), room=chosen)
    assert caught.value.field == "room.fan.quiet"
    idle = replace(chosen, device="none")
    assert list(idle.exclusions()) == []


def test_names_and_tables_of_tables() -> None:
    tables = {"room": {"doors": 2, "fan": {"speed": 4}}}
    assert flatten(tables) == {"room.doors": 2, "room.fan.speed": 4}
    assert unflatten(flatten(tables)) == tables
    merged = merge_tables(tables, {"room": {"fan": {"quiet": True}}})
    assert merged == {"room": {"doors": 2, "fan": {"speed": 4, "quiet": True}}}
    assert tables == {"room": {"doors": 2, "fan": {"speed": 4}}}
    for names in ({"room.fan": 1, "room.fan.speed": 2}, {"room.fan.speed": 2, "room.fan": 1}):
        with pytest.raises(ConfigError):
            unflatten(names)
