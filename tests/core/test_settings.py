from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.settings import flatten, from_table, to_table


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
        with pytest.raises(ConfigError) as caught:
            from_table(Box, "box", table)
        assert caught.value.field == field


def test_flatten_joins_names() -> None:
    assert flatten({"a": {"b": 1}, "c": {"d": 2}}) == {"a.b": 1, "c.d": 2}
