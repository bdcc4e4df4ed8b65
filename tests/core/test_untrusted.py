"""Names and documents from outside cannot do more than be wrong."""

from __future__ import annotations

import math

import pytest

from paceline.core.errors import ConfigError, DataError
from paceline.core.untrusted import (
    ParseError,
    is_count,
    is_finite,
    one_line,
    parse_json,
    parse_toml,
    printable,
    short_repr,
)


@pytest.mark.parametrize("text", ["plain.jpg", "größe 猫.png", ""])
def test_ordinary_names_stay(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x9b31m", "\x07", "\x00", "\u202e", "\ud800", "\r"])
def test_control_characters_do_not(evil: str) -> None:
    assert printable(f"a{evil}b").isprintable()
    assert one_line(f"a{evil}\nb").isprintable()
    for error in (DataError(f"a{evil}b", evil), ConfigError(f"x.{evil}", None, evil)):
        assert str(error).isprintable()


@pytest.mark.parametrize("value", ["x" * 10_000, ["y"] * 10_000, {"k": ["z" * 999] * 99}, 10**4000])
def test_a_value_in_a_message_is_short(value: object) -> None:
    assert len(short_repr(value)) < 500
    assert len(str(ConfigError("a.b", value, "is wrong"))) < 600


def test_a_deeply_nested_value_can_be_shown() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert len(short_repr(value)) < 500


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"= 3",
        b"a = " + b"[" * 100_000,
        b"a = " + b"1" * 10_000,
        b"a" + b".a" * 20_000 + b" = {",
    ],
)
def test_what_is_no_toml_is_one_kind_of_error(content: bytes) -> None:
    with pytest.raises(ParseError):
        parse_toml(content)


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[" * 100_000, b"1" * 10_000, b""])
def test_what_is_no_json_is_one_kind_of_error(content: bytes) -> None:
    with pytest.raises(ParseError):
        parse_json(content)


def test_numbers() -> None:
    assert is_count(0)
    assert not any(is_count(value) for value in (-1, True, 1.0, "1", None, 2**63))
    assert is_finite(1)
    assert is_finite(-1e300)
    assert not any(is_finite(v) for v in (math.nan, math.inf, True, "1", None, [1], 10**400))
