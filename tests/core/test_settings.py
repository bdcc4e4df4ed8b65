"""Settings as tables: read, written and refused by name; those of an owner are tables of a section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
from refusals import refused


@dataclass(frozen=True)
class Thing:
    size: int = 1
    rate: float = 0.5
    name: str = "x"
    fast: bool = False
    limit: int | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[float, ...] = ()


def test_values_take_the_declared_types() -> None:
    thing = from_table(Thing, "thing", {"rate": 2, "pair": [1, 2], "many": 3, "limit": 7})
    assert thing == Thing(rate=2.0, pair=(1.0, 2.0), many=(3.0,), limit=7)
    assert isinstance(thing.rate, float)


def test_a_table_comes_back() -> None:
    thing = Thing(size=3, many=(1.0, 2.0))
    assert from_table(Thing, "thing", to_table(thing)) == thing
    assert "limit" not in to_table(thing)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"siz": 2}, "thing.siz: unknown setting; did you mean 'size'?"),
        ({"size": 1.5}, "thing.size = 1.5: is a float; give a whole number"),
        ({"size": True}, "thing.size = True: is a bool; give a whole number"),
        ({"fast": 1}, "thing.fast = 1: is a int; give true or false"),
        ({"name": 3}, "thing.name = 3: is a int; give a text in quotes"),
        ({"limit": "many"}, "thing.limit = 'many': is a str; give a whole number"),
        ({"pair": [1.0]}, "thing.pair = [1.0]: has 1 values; give 2"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(table: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_table(Thing, "thing", table)
    assert str(caught.value) == line


@dataclass(frozen=True)
class Box:
    first: Thing
    rest: tuple[Thing, ...] = ()
    more: list[Thing] | None = None


def test_tables_in_tables_become_dataclasses() -> None:
    box = from_table(Box, "box", {"first": {"size": 2}, "rest": [{}, {"rate": 1}], "more": [{}]})
    assert box == Box(Thing(size=2), (Thing(), Thing(rate=1.0)), [Thing()])
    for table, field in (
        ({}, "box.first"),
        ({"first": 1}, "box.first"),
        ({"first": {"siz": 1}}, "box.first.siz"),
        ({"first": {}, "rest": [{}, {"size": "x"}]}, "box.rest[1].size"),
        ({"first": {}, "more": [{"size": "x"}]}, "box.more[0].size"),
        ({"first": {}, "more": {}}, "box.more"),
    ):
        with refused(field):
            from_table(Box, "box", table)


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
    with refused(field) as caught:
        room(**values)
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
    with refused("room.flue"):
        room(flue={"speed": 5})


def test_rows_of_a_chosen_owner_are_checked() -> None:
    chosen = room(device="fan", doors=0, fan={"quiet": True})
    with refused("room.fan.quiet"):
        check_exclusions(chosen.exclusions(), room=chosen)
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
